"""Constraints: the checks of a regular expression, grammar or schema, and the place that a message names.

An input is a JSON object as read_constraint takes it.
"""

import json

from kestrel_engine.errors import InvalidRequest
from kestrel_engine.skills.constraints.grammar_text import new_tokenizer, problem
from kestrel_engine.skills.constraints.setting import read_constraint

from ..json_mutator import mutated

_TOKENIZER = new_tokenizer([bytes([byte]) for byte in range(256)] + [b""], 256)


def take(data: bytes) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        constraint = read_constraint(value)
    except InvalidRequest:
        return
    if constraint is not None:
        problem(constraint, _TOKENIZER)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return mutated(data, most, seed)
