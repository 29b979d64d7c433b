"""The frozen evaluation set: scenes by index, as encoded files, with the tasks about each scene.

The scenes have seeds that training never uses (its seeds are "<number>/<step>/<rank>"). A change of these scenes or
tasks makes old figures incomparable, so a test checks their digest.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from training.scenes.captions import LENGTHS
from training.scenes.phrases import Phrase, draw_absent, draw_present, object_words, refer
from training.scenes.questions import Question, colour, draw_question, shape
from training.scenes.render import render_scene
from training.scenes.scenes import Scene, draw_scene, draw_size
from training.scenes.vocabulary import HELD_OUT


@dataclass(frozen=True)
class Task:
    """One request and its correct result.

    skill: query, reasoning, caption, point, detect or segment; text: the question, caption length or object;
    answer: of a query; targets: indices of the shapes meant (empty: absent); kind: the row of the table.
    """

    skill: str
    kind: str
    text: str
    answer: str = ""
    targets: tuple[int, ...] = ()
    refs: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Example:
    slice: str
    index: int
    scene: Scene
    tasks: tuple[Task, ...]


def _query(question: Question, skill: str = "query") -> Task:
    targets = tuple(i for _, indices in question.steps for i in indices)
    return Task(skill, question.kind, question.text, question.answer, targets, question.refs)


def _seen_tasks(rng: random.Random, scene: Scene, index: int) -> list[Task]:
    tasks = [_query(draw_question(rng, scene)) for _ in range(4)]
    tasks.append(_query(draw_question(rng, scene), "reasoning"))
    tasks.append(Task("caption", LENGTHS[index % 3], LENGTHS[index % 3]))
    for skill in ("point", "detect"):
        phrase = draw_present(rng, scene)
        if phrase is not None:
            words, found = object_words(rng, phrase), tuple(phrase.find(scene))
            tasks.append(Task(skill, skill, words, targets=found))
    singles = [(i, refer(rng, scene, i)) for i in range(len(scene.shapes))]
    named = [(i, phrase) for i, phrase in singles if phrase is not None]
    if named:
        i, single = rng.choice(named)
        tasks.append(Task("segment", "segment", object_words(rng, single), targets=(i,)))
    absent = draw_absent(rng, scene)
    if absent is not None:
        skill = ("point", "detect", "segment")[index // 3 % 3]
        tasks.append(Task(skill, "absent", object_words(rng, absent)))
    return tasks


def _unseen_tasks(rng: random.Random, scene: Scene, index: int) -> list[Task]:
    """Everything about one object whose colour and shape training never showed together."""
    rare = [i for i, s in enumerate(scene.shapes) if (s.colour, s.kind) in HELD_OUT]
    tasks = [Task("caption", LENGTHS[index % 3], LENGTHS[index % 3])]
    if not rare:
        return tasks
    target = scene.shapes[rng.choice(rare)]
    phrase = Phrase(target.kind, target.colour)
    found = tuple(phrase.find(scene))
    how_many = f"How many {phrase.plain(True)} are there?"
    tasks.append(Task("query", "count", how_many, str(len(found)), found))
    tasks.append(Task("query", "presence", f"Is there a {phrase.plain()}?", "yes", found))
    for maker in (colour, shape):
        question = maker(rng, scene)
        if question is not None and question.steps[0][1][0] in rare:
            tasks.append(_query(question))
    for skill in ("point", "detect"):
        tasks.append(Task(skill, skill, object_words(rng, phrase), targets=found))
    if len(found) == 1:
        tasks.append(Task("segment", "segment", object_words(rng, phrase), targets=found))
    return tasks


def example(name: str, index: int) -> Example:
    """Scene number ``index`` of a slice, with its tasks."""
    rng = random.Random(f"kestrel-tiny/evaluation/{name}/{index}")
    unseen = name == "unseen-pairs"
    scene = draw_scene(
        rng, *draw_size(rng), held_out=unseen, count=rng.randint(1, 8) if unseen else None
    )
    tasks = _unseen_tasks(rng, scene, index) if unseen else _seen_tasks(rng, scene, index)
    return Example(name, index, scene, tuple(tasks))


def _format(rng: random.Random) -> tuple[str, dict[str, Any]]:
    u = rng.random()
    if u < 0.1:
        return ".png", {}
    if u < 0.2:
        return ".webp", {"Q": rng.randint(70, 95)}
    return ".jpg", {"Q": rng.randint(60, 95)}


def encode(found: Example) -> bytes:
    """The example's image as a JPEG (60..95), PNG or WebP file, some rescaled, blurred or noisy."""
    import pyvips

    scene = found.scene
    rng = random.Random(f"kestrel-tiny/picture/{found.slice}/{found.index}")
    pixels = render_scene(scene).permute(1, 2, 0).numpy()
    blur, rescale, noise = rng.random() < 0.3, rng.random() < 0.25, rng.random() < 0.4
    image = pyvips.Image.new_from_array(np.ascontiguousarray(np.round(pixels).astype(np.uint8)))
    if rescale:
        factor = math.exp(rng.uniform(math.log(0.6), math.log(1.3)))
        width, height = (
            max(120, round(scene.width * factor)),
            max(120, round(scene.height * factor)),
        )
        image = image.resize(width / scene.width, vscale=height / scene.height, kernel="linear")
        image = image.resize(scene.width / width, vscale=scene.height / height, kernel="cubic")
    if blur:
        scale = max(scene.view.tiled_scale)
        image = image.gaussblur(rng.uniform(0.3, 1.2) / min(scale, 1.0))
    if noise:
        generator = np.random.default_rng(rng.randrange(2**32))
        array = image.numpy().astype(np.float32)
        array += generator.normal(0, rng.uniform(1, 10), array.shape).astype(np.float32)
        image = pyvips.Image.new_from_array(np.clip(np.round(array), 0, 255).astype(np.uint8))
    suffix, options = _format(rng)
    return bytes(image.copy(interpretation="srgb").write_to_buffer(suffix, **options))
