"""The frozen evaluation set: scenes by index, as encoded files, with the requests about each.

The scenes have seeds that training never uses (its seeds are "<number>/<step>/<rank>"). A change of these scenes or
requests makes old figures incomparable, so a test checks their digest.
"""

import math
import random
from dataclasses import dataclass

import numpy as np

from training.domains.picture import Ask
from training.scenes.captions import LENGTHS, caption
from training.scenes.paths import outline
from training.scenes.phrases import Phrase, draw_absent, draw_present, object_words, refer
from training.scenes.questions import as_ask, colour, draw_question, shape
from training.scenes.render import render_scene
from training.scenes.scenes import Scene, draw_scene, draw_size
from training.scenes.vocabulary import HELD_OUT


@dataclass(frozen=True)
class Example:
    slice: str
    index: int
    scene: Scene
    asks: tuple[Ask, ...]


def _find(scene: Scene, skill: str, words: str, indices: list[int]) -> Ask:
    shapes = [scene.shapes[i] for i in indices]
    boxes, outlines = tuple(s.box for s in shapes), tuple(map(outline, shapes))
    return Ask(skill, skill if shapes else "absent", words, boxes=boxes, outlines=outlines)


def _caption(scene: Scene, index: int) -> Ask:
    length = LENGTHS[index % 3]
    return Ask("caption", "caption", length, caption(scene, length))


def _seen_asks(rng: random.Random, scene: Scene, index: int) -> list[Ask]:
    asks = [as_ask(scene, draw_question(rng, scene)) for _ in range(4)]
    asks.append(as_ask(scene, draw_question(rng, scene), "reasoning"))
    asks.append(_caption(scene, index))
    for skill in ("point", "detect"):
        phrase = draw_present(rng, scene)
        if phrase is not None:
            asks.append(_find(scene, skill, object_words(rng, phrase), phrase.find(scene)))
    singles = [(i, refer(rng, scene, i)) for i in range(len(scene.shapes))]
    named = [(i, phrase) for i, phrase in singles if phrase is not None]
    if named:
        i, single = rng.choice(named)
        asks.append(_find(scene, "segment", object_words(rng, single), [i]))
    absent = draw_absent(rng, scene)
    if absent is not None:
        skill = ("point", "detect", "segment")[index // 3 % 3]
        asks.append(_find(scene, skill, object_words(rng, absent), []))
    return asks


def _unseen_asks(rng: random.Random, scene: Scene, index: int) -> list[Ask]:
    """Everything about one object whose colour and shape training never showed together."""
    rare = [i for i, s in enumerate(scene.shapes) if (s.colour, s.kind) in HELD_OUT]
    asks = [_caption(scene, index)]
    if not rare:
        return asks
    target = scene.shapes[rng.choice(rare)]
    phrase = Phrase(target.kind, target.colour)
    found = phrase.find(scene)
    asks.append(Ask("query", "count", f"How many {phrase.plain(True)} are there?", str(len(found))))
    asks.append(Ask("query", "presence", f"Is there a {phrase.plain()}?", "yes"))
    for maker in (colour, shape):
        question = maker(rng, scene)
        if question is not None and question.steps[0][1][0] in rare:
            asks.append(as_ask(scene, question))
    for skill in ("point", "detect"):
        asks.append(_find(scene, skill, object_words(rng, phrase), found))
    if len(found) == 1:
        asks.append(_find(scene, "segment", object_words(rng, phrase), found))
    return asks


def example(name: str, index: int) -> Example:
    """Scene number ``index`` of a slice, with its requests."""
    rng = random.Random(f"kestrel-tiny/evaluation/{name}/{index}")
    unseen = name == "unseen-pairs"
    scene = draw_scene(
        rng, *draw_size(rng), held_out=unseen, count=rng.randint(1, 8) if unseen else None
    )
    asks = _unseen_asks(rng, scene, index) if unseen else _seen_asks(rng, scene, index)
    return Example(name, index, scene, tuple(asks))


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
    u = rng.random()
    suffix = (
        ".png"
        if u < 0.1
        else f".{'webp' if u < 0.2 else 'jpg'}[Q={rng.randint(70 if u < 0.2 else 60, 95)}]"
    )
    return bytes(image.copy(interpretation="srgb").write_to_buffer(suffix))
