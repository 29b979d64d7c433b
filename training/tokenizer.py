"""kestrel-tiny's byte-level BPE tokenizer: trained on the template texts, with one id per path token.

``python -m training.tokenizer OUT.json`` writes it.  Ids 0..9 are the special tokens of Moondream 3, 10..20 are
reserved, because the segment grammar takes every id above 20 as text.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from kestrel_grpc.scenes.captions import LENGTHS, caption
from kestrel_grpc.scenes.paths import COMMANDS, GRID_VALUES
from kestrel_grpc.scenes.questions import draw_question
from kestrel_grpc.scenes.scenes import draw_scene, draw_size
from kestrel_grpc.scenes.vocabulary import (
    ANY_NOUNS,
    COLOURS,
    MEASURED_COLOURS,
    PLURALS,
    SHAPES,
    STYLE_WORDS,
    SYNONYMS,
)

SPECIAL: tuple[str, ...] = (
    "<|endoftext|>",
    *(f"<|md_reserved_{i}|>" for i in range(9)),
    *(f"<|reserved_{i}|>" for i in range(10, 21)),
)
SKILL_WORDS: tuple[str, ...] = ("describe", "query", "detect", "point", "segment", *LENGTHS)
MERGED = 420  # learned tokens beyond the bytes, before the path tokens


def path_token_text(token: str) -> str:
    """How a path token is written in the vocabulary: a space before all but the opening command."""
    return token if token == "M" else f" {token}"


def corpus(scenes: int = 4000, seed: int = 7) -> Iterator[str]:
    """Texts as training will see them, and every word by itself so that none is left in pieces."""
    rng = random.Random(seed)
    nouns = [w for pair in (*ANY_NOUNS, *SYNONYMS.values()) for w in pair]
    words = [
        *SHAPES,
        *PLURALS,
        *COLOURS[:MEASURED_COLOURS],
        *nouns,
        *(w for group in STYLE_WORDS for w in group),
    ]
    for _ in range(200):
        for word in words:
            yield word
            yield f"the {word}"
        yield from SKILL_WORDS
        yield from (str(i) for i in range(13))
        yield "I see no. I see"
    for _ in range(scenes):
        scene = draw_scene(rng, *draw_size(rng))
        for _ in range(6):
            question = draw_question(rng, scene)
            yield question.text
            yield question.answer
        yield caption(scene, rng.choice(LENGTHS))


def build() -> Tokenizer:
    """Train the merges, then give every path token an id of its own."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256 + MERGED,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    for token in (*COMMANDS, *map(str, GRID_VALUES)):
        text = path_token_text(token).replace(" ", "Ġ")
        vocab.setdefault(text, len(vocab))
    data["model"]["ignore_merges"] = True  # a whole word of the vocabulary is that one id
    return Tokenizer.from_str(json.dumps(data))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(build().to_str(pretty=True) + "\n", encoding="utf-8")
