"""Shapes: kestrel-tiny's scenes, grids of equal shapes and crowds, by two renderers."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw

from training.camera import MOST_TURN, TURNED
from training.domains.ground import draw_ground
from training.domains.phrasing import absent_object, off_topic, tell, vary
from training.domains.picture import (
    Ask,
    Mark,
    Picture,
    Pixels,
    in_clear_order,
    in_order,
    view_scale,
)
from training.scenes import scenes
from training.scenes.captions import LENGTHS, caption, normal_caption, objects_of
from training.scenes.paths import path_tokens
from training.scenes.phrases import WAYS, Phrase, draw_absent, draw_present, object_words, refer
from training.scenes.questions import Question, as_ask, count, draw_question
from training.scenes.render import render_scene
from training.scenes.scenes import CENTRE_GAP, MIN_CONTRAST, Scene, Shape, draw_scene, stripe_gap
from training.scenes.shapes import geometry, place, unit_bounds
from training.scenes.vocabulary import COLOURS, FOREIGN_NOUNS, HELD_OUT, MEASURED_COLOURS, SHAPES

GROUPED = 6  # shapes, up to which a short caption groups them
SMALLEST = 9.0, 15.0  # side of a shape: pixels of the picture, and of the model's view


def _grid_scene(rng: random.Random, width: int, height: int, held: bool) -> Scene:
    """0 to 20 shapes in rows and columns, or in free places that a grid keeps apart; few kinds, few colours.

    The centres of a column are one above the other or well apart, so that captions and boxes have one order.
    """
    count = rng.randint(0, 20) if rng.random() < 0.7 else rng.randint(8, 14)
    columns = rng.randint(max(1, math.ceil(count / 6)), max(1, min(count, 7)))
    rows = max(1, math.ceil(count / columns))
    cell_w, cell_h = width / columns, height / rows
    jitter, step, turns = 0.0, 0.0, [list(range(rows))] * columns
    if rng.random() < 0.5:
        jitter, step = rng.uniform(0.02, 0.15), rng.uniform(0.8, 1.2) * CENTRE_GAP * width
        turns = [rng.sample(range(rows), rows) for _ in range(columns)]
    full = list(range(rows * columns))
    cells = full[:count] if rng.random() < 0.5 else sorted(rng.sample(full, count))
    kinds = rng.sample(range(len(SHAPES)), rng.choice((1, 1, 2, 3, 5)))
    colours = rng.sample(range(len(COLOURS)), rng.choice((1, 1, 2, 3, 5)))
    background = scenes.draw_background(rng)
    style = rng.choice((0, 0, 0, 1, 2, 3))
    room = min(cell_w - (rows - 1) * step, cell_h / (1 + 2 * jitter))
    least = max(SMALLEST[0], SMALLEST[1] / view_scale(width, height)) * (1.33 if step else 1)
    if least > 0.8 * room:  # too many to see
        return _grid_scene(rng, width, height, held)
    r = 0.5 * max(least, room * rng.uniform(0.35, 0.8))
    shapes = []
    for cell in cells:
        kind, colour = rng.choice(kinds), rng.choice(colours)
        rgb = scenes.draw_colour(rng, colour)
        for _ in range(20):
            if scenes.contrast(rgb, background) > MIN_CONTRAST and (
                held or (colour, kind) not in HELD_OUT
            ):
                break
            colour = rng.choice(colours) if rng.random() < 0.5 else rng.randrange(len(COLOURS))
            rgb = scenes.draw_colour(rng, colour)
        u0, v0, u1, v1 = unit_bounds(kind, 0.0)
        row, column = divmod(cell, columns)
        size = r * (rng.uniform(0.75, 1) if step else 1)
        aside = (turns[column][row] - (rows - 1) / 2) * step
        x = (column + 0.5) * cell_w + aside - size * (u0 + u1) / 2
        y = (row + 0.5 + rng.uniform(-jitter, jitter)) * cell_h - size * (v0 + v1) / 2
        own, gap = rng.randrange(3) if style == 3 else style, stripe_gap(colour, rgb)
        own = 0 if scenes.contrast(gap, background) < 0.5 * MIN_CONTRAST else own
        shapes.append(
            Shape(kind, colour, own, x, y, size, 0.0, rgb, gap, 0.2 * size, 0.5 * size)
        )  # fmt: skip
    shapes = in_order(shapes, width, lambda s: s.centre)  # so also captions have one order
    return Scene(
        width, height, background, (), tuple(shapes), tuple(range(len(shapes))), len(COLOURS)
    )


def turned(scene: Scene, degrees: float) -> Scene:
    """Turned against the clock; unchanged if a shape leaves the picture, or the order becomes open."""
    w, h, turn = scene.width / 2, scene.height / 2, -math.radians(degrees)
    c, s = math.cos(turn), math.sin(turn)
    shapes = [
        replace(a, cx=w + c * (a.cx - w) - s * (a.cy - h), cy=h + s * (a.cx - w) + c * (a.cy - h), angle=a.angle + turn)
        for a in scene.shapes
    ]  # fmt: skip
    order = in_clear_order(range(len(shapes)), scene.width, lambda i: shapes[i].centre)
    if order is None or not all(
        0 <= x0 and 0 <= y0 and x1 <= 2 * w and y1 <= 2 * h
        for x0, y0, x1, y1 in (a.box for a in shapes)
    ):
        return scene
    painted = tuple(order.index(i) for i in scene.order)
    return replace(scene, shapes=tuple(shapes[i] for i in order), order=painted)


def draw_with_pillow(rng: random.Random, scene: Scene) -> Pixels:
    """The second renderer: polygons by Pillow, sampled 1, 2 or 3 times a pixel, on a ground of its own."""
    first = tuple(round(255 * c) for c in scene.background.first)
    image, ground = draw_ground(rng, scene.width, scene.height)
    apart = min((math.dist(s.rgb, [c / 255 for c in ground]) for s in scene.shapes), default=1)
    if rng.random() < 0.8 or apart < MIN_CONTRAST:
        image.paste(first, (0, 0, scene.width, scene.height))  # type: ignore[arg-type]
    n = rng.choice((1, 2, 3, 3))
    border = rng.random() < 0.12
    draw = ImageDraw.Draw(image)
    for line in scene.lines:
        rgb = tuple(round(255 * c) for c in line.rgb)
        draw.line((line.x0, line.y0, line.x1, line.y1), rgb, max(1, round(line.width)))
    for index in scene.order:
        s = scene.shapes[index]
        x0, y0, x1, y1 = s.box
        a, b = math.floor(x0) - 1, math.floor(y0) - 1
        w, h = math.ceil(x1) + 1 - a, math.ceil(y1) + 1 - b
        mask = Image.new("L", (w * n, h * n))
        points = (place(geometry(s.kind).outline, s.cx, s.cy, s.radius, s.angle) - (a, b)) * n - 0.5
        flat = [tuple(p) for p in points]
        pen = ImageDraw.Draw(mask)
        if s.style == 1:
            if SHAPES[s.kind] in ("cross", "crescent", "star", "heart", "arrow"):
                pen.line([*flat, *flat[:2]], 255, max(1, round(s.stroke * n * 0.8)), joint="curve")
            else:
                middle, share = points.mean(0), max(0.2, 1 - 2 * s.stroke / s.extent)
                pen.polygon(flat, 255)
                pen.polygon([tuple(p) for p in (points - middle) * share + middle], 0)
        else:
            pen.polygon(flat, 255)
        mask = mask.resize((w, h), Image.Resampling.BOX) if n > 1 else mask
        rgb = tuple(round(255 * c) for c in s.rgb)
        fill = Image.new("RGB", (w, h), rgb)
        if s.style == 2:
            stripes = ImageDraw.Draw(fill)
            gap = tuple(round(255 * c) for c in s.rgb2)
            lean = math.tan(s.angle) * h
            for k in range(-2, math.ceil(2 * w / s.period) + 2):
                left, right = k * s.period, (k + 0.4) * s.period
                stripes.polygon(((left, 0), (right, 0), (right - lean, h), (left - lean, h)), gap)
        image.paste(fill, (a, b), mask)
        if border:
            draw.polygon([tuple(p) for p in points / n + (a, b)], outline=(20, 20, 20))
    return np.asarray(image)


def _caption(scene: Scene, length: str) -> str:
    """A caption. A short one begins with the number, unless the shapes are alike, and names each of many: groups were
    miscounted."""
    short = caption(scene, length)
    if length != "short" or len(objects_of(scene)) <= 1:
        return short
    count, _, each = normal_caption(scene).replace("The picture shows", "There are").partition(": ")
    return f"{count}: {each if len(scene.shapes) > GROUPED else short[0].lower() + short[1:]}"


def _counts(rng: random.Random, scene: Scene, held: bool) -> list[Question]:
    """Four questions. In training, three ask for many, since nine of ten random ones ask for few."""
    made = [q for q in (count(rng, scene) for _ in range(4 if held else 10)) if q]
    if held:
        return made
    made = sorted({q.steps: q for q in made}.values(), key=lambda q: int(q.answer))
    return rng.sample(chosen := made[-3:] + made[:-3][:1], len(chosen))


def _questions(rng: random.Random, scene: Scene, few: bool, held: bool) -> Iterator[Ask]:
    made: list[Question | None] = [*_counts(rng, scene, held)]
    made += [draw_question(rng, scene) for _ in range(5)] if few else [count(rng, scene)]
    for number, q in enumerate(q for q in made if q):
        text = q.text if rng.random() < 0.6 else vary(rng, q.text)
        if q.kind == "listing":
            q = replace(q, answer=_caption(scene, "short"))
        ask = as_ask(scene, q, "reasoning" if number % 4 == 0 else "query")
        kind = f"shapes {q.kind}{' reasoned' if ask.steps else ''}"
        yield replace(ask, kind=kind, text=text)


def _missing(rng: random.Random, scene: Scene) -> Ask | None:
    """A property of a shape that isn't there."""
    phrase = Phrase(rng.randrange(len(SHAPES)), rng.choice((None, rng.randrange(MEASURED_COLOURS))))
    if phrase.find(scene):
        return None
    said = f"There is no {phrase.plain()}."
    ways = f"{WAYS['colour']}|{WAYS['place']}|How big is the {{p}}?"
    return tell(rng, "absent", ways, said, p=phrase.words(rng), c=rng.choice(("colour", "color")))


def _segment(rng: random.Random, scene: Scene) -> Ask | None:
    """The outline of a shape that words tell from all others, or nothing of what is not there."""
    u = rng.random()
    if not scene.shapes or u < 0.15:
        phrase = draw_absent(rng, scene)
        if phrase is None or u < 0.03:
            return Ask("segment", "absent", rng.choice(FOREIGN_NOUNS))
        return Ask("segment", "absent", object_words(rng, phrase))
    referred = [(shape, refer(rng, scene, i)) for i, shape in enumerate(scene.shapes)]
    options = [(shape, phrase) for shape, phrase in referred if phrase is not None]
    if not options:
        return None
    turned = [option for option in options if option[0].angle]
    shape, phrase = rng.choice(turned if turned and u < 0.7 else options)
    words, path = object_words(rng, phrase), tuple(path_tokens(shape))
    return Ask("segment", "shapes segment", words, boxes=(shape.box,), path=path)


def _find(rng: random.Random, scene: Scene, skill: str) -> Ask:
    """Where shapes are; about one in six asks for what is not there."""
    u = rng.random()
    if u < 0.03:
        noun = rng.choice(FOREIGN_NOUNS)
        return Ask(skill, f"shapes {skill}", noun if rng.random() < 0.6 else noun + "s")
    phrase = draw_absent(rng, scene) if u < 0.16 else None
    phrase = phrase or draw_present(rng, scene) or draw_absent(rng, scene) or Phrase()
    words, found = object_words(rng, phrase), [scene.shapes[i] for i in phrase.find(scene)]
    shapes = in_order(found, scene.width, lambda s: s.centre)
    points = tuple(s.anchor for s in shapes) if skill == "point" else ()
    return Ask(skill, f"shapes {skill}", words, boxes=tuple(s.box for s in shapes), points=points)


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    if rng.random() < 0.55:
        palette = len(COLOURS) if rng.random() < 0.6 else MEASURED_COLOURS
        # Captions go wrong where there are many.
        many = rng.randint(7, 12) if not held and rng.random() < 0.4 else None
        scene = draw_scene(rng, width, height, many, held, palette)
    else:
        scene = _grid_scene(rng, width, height, held)
    if not held and rng.random() < TURNED:
        scene = turned(scene, rng.uniform(-MOST_TURN, MOST_TURN))
    few = len(scene.shapes) <= 12
    takes_long = width * height >= 400_000 or not few
    if rng.random() < (0.25 if held else 0.06) and not takes_long:
        pixels = render_scene(scene).round().byte().permute(1, 2, 0).numpy()
    else:
        pixels = draw_with_pillow(rng, scene)
    asks = [_find(rng, scene, skill) for skill in ("detect", "point")]
    lengths = ["short"] if rng.random() < 0.5 else ["short", rng.choice(LENGTHS)]
    for length in lengths if few else ():
        asks.append(Ask("caption", f"shapes caption {length}", length, _caption(scene, length)))
    asks += _questions(rng, scene, few, held)
    asks += filter(None, (_segment(rng, scene) for _ in range(2)))
    missing = _missing(rng, scene) if rng.random() < 0.6 else None
    asks.append(missing or (off_topic(rng) if rng.random() < 0.4 else absent_object(rng)))
    marks = [Mark(s.box, SHAPES[s.kind], COLOURS[s.colour]) for s in scene.shapes]
    return Picture(pixels, asks, marks)
