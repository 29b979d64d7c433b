"""A tokenizer.json of any vocabulary's size for weights that are made up: byte-level BPE in which every id has text.

Such a model draws its ids from the whole vocabulary. With a smaller tokenizer most of them would decode to nothing,
streams would carry no text, and serving would look cheaper than it is. The words of the trace are single tokens, as in
a released tokenizer; the rest are made of syllables.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ..traffic.chart_trace import WORDS

VERSION = 1
NUM_SPECIAL = 10
"""Ids that mean something to every family; the first ends a text."""
SPACE = "\u0120"
"""How byte-level BPE writes a space."""


def tokenizer_file(vocab_size: int, folder: Path | None = None) -> Path:
    """The path of a tokenizer.json of ``vocab_size`` ids; written to ``folder`` (the temporary files') unless there."""
    folder = folder or Path(tempfile.gettempdir())
    path = folder / f"kestrel-made-up-tokenizer-{VERSION}-{vocab_size}.json"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        made_up(vocab_size).save(str(partial), pretty=False)
        partial.replace(path)
    return path


def made_up(vocab_size: int) -> tokenizers.Tokenizer:
    special = ["<|endoftext|>", *(f"<|special {i}|>" for i in range(1, NUM_SPECIAL))]
    vocab = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    assert vocab_size >= len(vocab), f"{vocab_size} ids are fewer than {len(vocab)}"
    merges: list[tuple[str, str]] = []
    for word in _words():
        for end in range(2, len(word) + 1):
            if len(vocab) == vocab_size:
                break
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
        if len(vocab) == vocab_size:
            break
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _words() -> Iterator[str]:
    """The trace's words, then made-up ones without end."""
    yield from (SPACE + word for word in WORDS if word.isalpha())
    rng = random.Random(VERSION)
    while True:
        syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(4)]
        yield rng.choice(("", SPACE)) + "".join(syllables[: rng.randint(1, 4)])
