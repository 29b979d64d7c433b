"""The tokenizer keeps the segment grammar: one id above 20 for every path token."""

import random

from training.prompts import PromptWriter, path_token_text
from training.scenes.captions import LENGTHS, caption
from training.scenes.paths import COMMANDS, GRID_VALUES
from training.scenes.questions import draw_question
from training.scenes.scenes import draw_scene, draw_size


def test_every_path_token_is_one_id_above_the_reserved_ones(writer: PromptWriter) -> None:
    for token in (*COMMANDS, *map(str, GRID_VALUES)):
        ids = writer.encode(path_token_text(token))
        assert len(ids) == 1 and ids[0] > 20
        assert writer.tokenizer.decode(ids).strip() == token


def test_special_ids(writer: PromptWriter) -> None:
    names = [
        "endoftext",
        *(f"md_reserved_{i}" for i in range(9)),
        *(f"reserved_{i}" for i in range(10, 21)),
    ]
    for number, name in enumerate(names):
        assert writer.tokenizer.token_to_id(f"<|{name}|>") == number
    assert writer.tokenizer.decode(list(range(21))) == ""


def test_texts_survive_and_words_are_whole(writer: PromptWriter) -> None:
    rng = random.Random(4)
    for _ in range(30):
        scene = draw_scene(rng, *draw_size(rng))
        texts = [
            draw_question(rng, scene).text,
            caption(scene, rng.choice(LENGTHS)),
            "Größe? 图 🙂",
        ]
        for text in texts:
            assert writer.tokenizer.decode(writer.encode(text)) == text
    assert len(writer.encode(" red circles")) == 2
