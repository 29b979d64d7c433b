"""kestrel-small: its sizes, tokenizer, packed pictures, checkpoint and figures."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.model_config import parse_model_config
from training.domains.picture import Ask, Picture
from training.images.picture_images import PictureMaker
from training.judging import Reply, distance, score
from training.kestrel_small import SIZES, TOKENIZER_FILE, VIEW
from training.learning import checkpoints
from training.learning.losses import PageHelper
from training.learning.model import Moondream
from training.mixture import draw_picture
from training.prompts import COORD, SIZE
from training.scenes.tiling import choose_tiling
from training.writing import (
    CHARACTERS,
    LABELS,
    LENGTH,
    PLACES,
    draw_spoiling,
    helper_targets,
    opening,
    pack,
    write,
    writer,
)

RESUME = Path(__file__).parents[2] / "training" / "resume"


def test_sizes_fit_the_wheel_and_the_cache() -> None:
    weights = checkpoints.load_quantised(RESUME)["model"]
    assert 25e6 < sum(t.numel() for t in weights.values()) < 30e6  # 60 MB in bfloat16
    assert VIEW.prefix == 1025 and VIEW.prefix % 5 == 0 and (VIEW.prefix + LENGTH) % 16 == 0


def test_the_engine_tiles_alike() -> None:
    config = json.loads(json.dumps({"config": SIZES.as_json(), "model_type": "moondream3"}))
    model = parse_model_config(config)
    assert model.image_prefix == VIEW.prefix and model.text.moe is not None
    rng = random.Random(6)
    for _ in range(400):
        size = rng.randint(60, 2400), rng.randint(60, 2400)
        assert choose_tiling(*size, VIEW) == select_tiling(*size, model.vision)
    assert choose_tiling(850, 600, VIEW) == (1, 1) and choose_tiling(1280, 720, VIEW) == (1, 2)


def test_tokenizer_spells_what_it_does_not_list() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    assert tokenizer.get_vocab_size() == SIZES.vocab
    for text in ("What is the value of Zyx in 2018?", ' "Total" £12.50', "two\nlines", " 160"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("2018").tokens == list("2018")
    assert tokenizer.encode(" the arrow up icon").tokens == ["Ġthe", "Ġarrow", "Ġup", "Ġicon"]
    assert (
        tokenizer.token_to_id("<|md_reserved_4|>") == 5 and len(tokenizer.encode(" 160").ids) == 1
    )


def _asks() -> list[Ask]:
    box = (20.0, 30.0, 120.0, 90.0)
    return [
        Ask("query", "text read", "Read the text.", "Hi 5", spelled=True),
        Ask("query", "charts value", "What is the value of A?", "12%", spelled=True),
        Ask("caption", "icons caption", "short", "A home icon."),
        Ask("detect", "shapes detect", "red square", boxes=(box, (130.0, 30.0, 180.0, 90.0))),
        Ask("detect", "absent", "dog"),
        Ask("point", "icons point", "home icon", boxes=(box,), points=((70.0, 60.0),)),
        Ask("segment", "shapes segment", "square", boxes=(box,), path=tuple("M 0 0 L 960 0 960 960 0 960 z".split())),
        Ask("query", "text here", "What is this?", "x", refs=((70.0, 60.0), box), spelled=True),
    ]  # fmt: skip


def test_a_prompt_begins_with_its_opening() -> None:
    for ask in _asks():
        asked, whole = opening(ask, 200, 100), write(ask, 200, 100)
        assert whole.ids[: len(asked.ids)] == asked.ids and whole.start == len(asked.ids)
        assert whole.ids[-1] == 0 and len(whole.values) == len(whole.ids)
        assert whole.ids[whole.start :].count(SIZE) == len(ask.boxes) * (ask.skill != "point")


@pytest.mark.parametrize("ask", _asks(), ids=lambda ask: ask.kind)
def test_the_truth_has_full_marks(ask: Ask) -> None:
    prompt = write(ask, 200, 100)
    reply = Reply(ask)
    for token, value in list(zip(prompt.ids, prompt.values, strict=True))[prompt.start : -1]:
        if token == COORD:
            reply.numbers.append(value[0])
        elif token == SIZE:
            reply.sizes.append(value)
        else:
            reply.ids.append(token)
    won, possible = score(reply, 200, 100)
    assert won == pytest.approx(possible, abs=0.02) and possible > 0
    wrong = Reply(ask, ids=[300, 301], numbers=[0.99, 0.99], sizes=[(0.001, 0.001)])
    assert score(wrong, 200, 100)[0] < 0.5 * possible


@pytest.mark.parametrize("kind", ["charts value", "charts value shown", "webcharts value"])
def test_a_value_is_right_within_five_percent(kind: str) -> None:
    ask = Ask("query", kind, "A?", "200", spelled=True)
    near, far = (
        Reply(ask, ids=[i for c in said for i in writer().encode(c)]) for said in ("209", "211")
    )
    assert score(near, 100, 100) == (1, 1) and score(far, 100, 100) == (0, 1)


def test_distance_is_levenshtein() -> None:
    assert (
        distance("kitten", "sitting") == 3 and distance("", "ab") == 2 and distance("a", "a") == 0
    )


def test_helper_targets_name_characters_and_objects() -> None:
    picture = draw_picture(random.Random(2), "shapes", (640, 640))
    picture = Picture(picture.pixels, [], picture.marks, [(30.0, 5.0, "A"), (37.0, 15.0, "b")])
    characters, labels, colours, boxes = helper_targets(picture)
    assert characters.shape == (VIEW.grid**2, PLACES[0] * PLACES[1])
    assert "".join(CHARACTERS[c] for c in characters[1] if c) == "Ab"
    for mark in picture.marks:
        x, y = (mark.box[0] + mark.box[2]) / 2, (mark.box[1] + mark.box[3]) / 2
        cell = int(y / 20) * VIEW.grid + int(x / 20)
        assert labels[cell] > 0 and colours[cell] > 0 and boxes[cell].max() <= 1.01
    assert {m.label for m in picture.marks} <= set(LABELS)


def test_the_helper_head_learns_no_emptiness_from_incomplete_pictures() -> None:
    rng, helper = random.Random(2), PageHelper(32)
    image = torch.randn(1, VIEW.grid**2, 32, requires_grad=True)
    for complete in (True, False):
        picture = draw_picture(random.Random(2), "shapes", (640, 640))
        picture = Picture(picture.pixels, picture.asks, [], [(30.0, 5.0, "A")], complete)
        characters, objects = helper(image, pack(rng, [picture], draw_spoiling(rng, 1)))
        (slope,) = torch.autograd.grad(characters + objects, image)
        assert slope[0, 1].any() and bool(slope[0, 2:].any()) == complete


def test_packed_pictures_become_crops(sources: Path) -> None:
    rng = random.Random(4)
    pictures = [draw_picture(rng, name, (320, 240)) for name in ("text", "icons")]
    batch = pack(rng, pictures, draw_spoiling(rng, 2))
    assert batch.ids.shape == (2, LENGTH) and int(batch.position.max()) < VIEW.prefix + LENGTH
    assert len(batch.coord_index) == int((batch.text_target == COORD).sum())
    pixels = PictureMaker(compiled=False)(batch)
    assert pixels.shape == (2, 1, 3, VIEW.crop, VIEW.crop) and pixels.abs().max() <= 1
    mean = np.mean([p.pixels.mean() for p in pictures]) / 127.5 - 1
    assert float(pixels.mean()) == pytest.approx(mean, abs=0.05)


def test_a_quantised_checkpoint_is_near(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.randn(40, 300), "bias": torch.randn(40)}}
    checkpoints.save(tmp_path, checkpoints.quantised(checkpoints.halved(state)))
    loaded = checkpoints.load_quantised(tmp_path)["model"]
    error = (loaded["weight"] - state["model"]["weight"]).norm() / state["model"]["weight"].norm()
    assert float(error) < 0.012 and torch.allclose(
        loaded["bias"], state["model"]["bias"], atol=0.02
    )


def test_the_checkpoint_to_resume_fits_the_model() -> None:
    pieces = sorted(RESUME.glob("part-*.bin"))
    assert pieces and all(piece.stat().st_size < 16 * 2**20 for piece in pieces)
    Moondream(SIZES).load_state_dict(checkpoints.load_quantised(RESUME)["model"])
