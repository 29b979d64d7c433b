"""Generates a tokenizer.json of any vocabulary size for random weights: byte-level BPE in which every id has a text.

A model with random weights samples ids from the whole vocabulary. With a smaller tokenizer, most ids would decode to an
empty text, streams would contain no text, and serving would seem cheaper than it is. The words of the trace are single
tokens, as in a released tokenizer. The other tokens are words of random syllables.
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
"""The ids that are special in every family. The first one ends a text."""
SPACE = "\u0120"
"""How byte-level BPE writes a space."""


def tokenizer_file(vocab_size: int, folder: Path | None = None) -> Path:
    """Returns the path of a tokenizer.json of ``vocab_size`` ids. Writes it to ``folder`` unless it exists there."""
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
    """Yields the trace's words, then generated words without end."""
    yield from (SPACE + word for word in WORDS if word.isalpha())
    rng = random.Random(VERSION)
    while True:
        syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(4)]
        yield rng.choice(("", SPACE)) + "".join(syllables[: rng.randint(1, 4)])
