"""A tokenizer.json to the description of the released one: its 51,200 ids, and the texts of the ids that are known.

The released vocabulary is a byte-level BPE whose alphabet lacks 16 bytes, and whose last 10,000 tokens cross blanks.
Nobody may distribute the file. Here made-up words have the ids whose text is not known.
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kestrel_engine.maintenance.releases import STARMIE

KNOWN_IDS = {text: ids[0] for text, ids in STARMIE.ids.items() if len(ids) == 1}
VOCABULARY = STARMIE.vocabulary
NUM_SPECIAL = 21
MISSING = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF1, 0xF4), *range(0xF5, 0x100))}
"""Characters of the byte-level alphabet without an id: no UTF-8 text has 13 of these bytes. The others begin characters
that the training text lacked."""


def released_tokenizer(folder: Path) -> Path:
    """Writes the file into ``folder`` and returns its path."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    special = sorted(
        (text for text, number in KNOWN_IDS.items() if number < NUM_SPECIAL),
        key=KNOWN_IDS.__getitem__,
    )
    pieces = dict(zip(("det", "ect"), STARMIE.ids["detect"], strict=True))
    spelled = {
        level.pre_tokenize_str(text)[0][0]: number
        for text, number in (KNOWN_IDS | pieces).items()
        if number >= NUM_SPECIAL
    }
    alphabet = sorted(set(level.alphabet()) - MISSING)
    vocab = {token: number for number, token in enumerate([*special, *alphabet])}
    assert all(vocab[token] == number for token, number in spelled.items() if len(token) == 1)
    vocab |= spelled
    free = iter(sorted(set(range(VOCABULARY)) - set(vocab.values())))
    merges: list[tuple[str, str]] = []
    lengths = dict.fromkeys(sorted(spelled, key=lambda token: (len(token), token)), 1)
    lengths |= {
        level.pre_tokenize_str(text)[0][0]: count for text, count in STARMIE.lengths.items()
    }
    for token, length in lengths.items():
        parts = list(token)
        for pair in merges:  # The first merge of the list goes first.
            parts = _merged(parts, pair)
        while len(parts) > length:
            pair = (parts[0], parts[1])
            merges.append(pair)
            parts = _merged(parts, pair)
            if parts[0] not in vocab:
                vocab[parts[0]] = next(free)
    vocab |= {f"word{number}": number for number in free}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"), pretty=False)
    return folder / "tokenizer.json"


def _merged(parts: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """``parts`` in which each occurrence of ``pair`` is one part."""
    made: list[str] = []
    for part in parts:
        if made and (made[-1], part) == pair:
            made[-1] += part
        else:
            made.append(part)
    return made
