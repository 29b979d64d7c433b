"""The number of tokens that a request may sample, from its own limits and those of context and engine."""

from __future__ import annotations

from ...errors import ContextLengthError, InvalidRequest
from ...skills.base import SkillRequest


def token_limit(
    request: SkillRequest, positions: int, *, context: int, most: int | None, default: int
) -> int:
    """Returns the most tokens to sample. A limit of the request that exceeds the room is an error; a default shrinks.

    ``positions``: of the prompt. ``context``: positions of a sequence. ``most``: the engine's limit on the tokens of a
    request. ``default``: the default of max_tokens. Raises ContextLengthError, InvalidRequest.
    """
    room = context - positions
    asked = [("max_tokens", request.max_tokens or 0, f"{request.max_tokens}")]
    if request.max_reasoning_tokens is not None:
        # The rest: the token that separates the reasoning from the answer, and an answer.
        wanted, rest = request.max_reasoning_tokens, 1 + (request.max_tokens or 1)
        asked.append(("max_reasoning_tokens", wanted + rest, f"{wanted} + {rest} for the answer"))
    for field, needed, shown in asked:
        if needed > room:
            raise ContextLengthError(
                field,
                f"{shown} exceeds the {room} positions left after a prompt of {positions} in a context of {context}",
            )
        if most is not None and needed > most:
            raise InvalidRequest(field, f"{shown} exceeds this engine's limit of {most}")
    return min(request.token_budget or request.max_tokens or default, room, most or room)
