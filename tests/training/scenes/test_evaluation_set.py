"""The evaluation is frozen: its scenes and tasks do not change, and hold what they should."""

import hashlib

import pytest

from training.scenes.evaluation_set import Example, encode, example
from training.scenes.vocabulary import HELD_OUT

FROZEN = {"seen": "49cdff2f1aa69758", "unseen-pairs": "e436175b7121ce12"}


def _digest(examples: list[Example]) -> str:
    lines = []
    for found in examples:
        scene = found.scene
        lines.append(f"{scene.width} {scene.height}")
        lines += [
            f"{s.kind} {s.colour} {s.style} {s.cx:.2f} {s.cy:.2f} {s.radius:.2f}"
            for s in scene.shapes
        ]
        for ask in found.asks:
            centres = [f"{x0 + x1:.2f} {y0 + y1:.2f}" for x0, y0, x1, y1 in ask.boxes]
            lines.append(f"{ask.skill}|{ask.kind}|{ask.text}|{ask.answer}|{centres}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", FROZEN)
def test_scenes_and_tasks_are_frozen(name: str) -> None:
    assert _digest([example(name, i) for i in range(60)]) == FROZEN[name]


def test_seen_slice_never_shows_or_names_a_held_out_pair() -> None:
    for i in range(60):
        assert not any((s.colour, s.kind) in HELD_OUT for s in example("seen", i).scene.shapes)


def test_unseen_slice_always_shows_one() -> None:
    for i in range(30):
        assert any((s.colour, s.kind) in HELD_OUT for s in example("unseen-pairs", i).scene.shapes)


def test_images_are_reproducible_files() -> None:
    pytest.importorskip("pyvips")
    first = encode(example("seen", 5))
    assert first == encode(example("seen", 5))
    assert first[:2] == b"\xff\xd8" or first[:4] in (b"RIFF", b"\x89PNG")
