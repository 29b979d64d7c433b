"""kestrel-small's tokenizer: bytes, the words of the domains' questions and answers, and path tokens; no merges.

    python -m training.domains.vocabulary

If the tokenizer is there already, its ids stay and only spare ones get words.
A word that isn't listed is spelled in bytes, and digits always are, so that reading and asking use single characters.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from training.kestrel_small import SIZES, TOKENIZER_FILE
from training.mixture import DOMAINS, draw_picture
from training.prompts import path_token_text
from training.scenes.captions import LENGTHS
from training.scenes.paths import COMMANDS, GRID_VALUES
from training.sources import icon_names

SPECIAL = (
    "<|endoftext|>",
    *(f"<|md_reserved_{i}|>" for i in range(9)),
    *(f"<|reserved_{i}|>" for i in range(10, 21)),
)
"""Ids 0 to 9 are Moondream 3's; the segment grammar takes every id above 20 as text."""
SKILL_WORDS = ("describe", "query", "detect", "point", "segment", *LENGTHS)
SPARE = "<|spare_"
LEAST = 8  # times that a word occurs


def words_of(file: Path) -> dict[str, int]:
    """The ids of a tokenizer that are in use."""
    vocab = json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
    return {text: i for text, i in vocab.items() if not text.startswith(SPARE)}


def build(kept: dict[str, int] | None = None, pictures: int = 3000, seed: int = 11) -> Tokenizer:
    """The most frequent words of that many pictures' questions and plain answers, but for words in quotation marks.

    kept: ids that stay as they are, so that a checkpoint can be trained on with more domains.
    """
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    counts: Counter[str] = Counter()

    def add(text: str, weight: int = 1) -> None:
        for word, _ in split.pre_tokenize_str(text):
            if len(word) > 1 and not any(c.isdigit() for c in word):
                counts[word] += weight

    for word in SKILL_WORDS:
        add(word, 100_000)
    for name in icon_names():
        add(f"{name} {name}", 1000)
    for number in range(pictures):
        rng = random.Random(f"{seed}/{number}")
        for ask in draw_picture(rng, rng.choice(list(DOMAINS)), (400, 300)).asks:
            add("".join(ask.text.split('"')[::2]))
            if not ask.spelled:
                add(ask.answer)
    vocab = kept or {text: i for i, text in enumerate(SPECIAL)}
    for text in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(text, len(vocab))
    paths = [path_token_text(t).replace(" ", "Ġ") for t in (*COMMANDS, *map(str, GRID_VALUES))]
    room = SIZES.vocab - len(vocab) - len(set(paths) - set(vocab))
    for text, _ in counts.most_common():
        if counts[text] >= LEAST and text not in vocab and room > 0:
            vocab[text] = len(vocab)
            room -= 1
    for text in paths:
        vocab.setdefault(text, len(vocab))
    while len(vocab) < SIZES.vocab:
        vocab[f"{SPARE}{len(vocab)}|>"] = len(vocab)
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


if __name__ == "__main__":
    old = words_of(TOKENIZER_FILE) if TOKENIZER_FILE.exists() else None
    text = json.dumps(json.loads(build(old).to_str()), ensure_ascii=False, indent=0)
    TOKENIZER_FILE.write_text(text + "\n", encoding="utf-8")
