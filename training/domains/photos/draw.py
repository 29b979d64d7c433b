"""One photograph or emoji, or several on a ground: what they are, which are there, where and how many."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from training.domains.ground import draw_ground, hsv
from training.domains.icons.draw import Square, layout
from training.domains.photos.names import OTHER, UNKNOWN, emoji, photographs
from training.domains.phrasing import off_topic, tell
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order
from training.domains.text.fonts import sources
from training.scenes.phrases import with_article

OUTSIDE = 0.22  # share of the things that are outside the list
_SMALLEST = {"photo": 96.0, "emoji": 28.0}  # pixels of the model's view
_ALONE = (
    "What is this?|What is in the {picture}?|What does the {picture} show?|What is shown here?|Name this thing.|"
    "What thing is this?|What do you see?|Which {noun} is this?"
)
_HERE = "What is this?|What is here?|What does this show?|Name this.|Which thing is this?|What {noun} is this?"
_KIND = "Which kind of {n} is this?|What kind of {n} is it?|What type of {n} is this?"
_SOME = "How many {n} {noun}s are there?|How many {noun}s show {n}?|Count the {n} {noun}s."
_EVERY = "How many {noun}s are there?|How many {noun}s do you see?|Count the {noun}s."
_THERE = "Do you see {n}?|Is there {n}?|Is {n} in the {{picture}}?|Can you see {n} here?|Is there {n} here?"
_WHICH = "Which of these do you see: {list}?|Which of these are in the {picture}: {list}?|Which are there: {list}?"


@dataclass(frozen=True)
class _Thing:
    """name: "" outside the list."""

    name: str
    kind: str
    box: Box


Files = dict[
    str, list[tuple[str, bytes]]
]  # kind and WebP by name; "?" comes before what is outside the list


@cache
def _files(noun: str, held: bool) -> Files:
    spoken = {key.replace("-", ""): name for name, keys in emoji().items() for key in keys}
    found: Files = {}
    with zipfile.ZipFile(sources() / ("held" if held else ".") / f"{noun}s.zip") as archive:
        for entry in archive.namelist():
            folder, _, file = entry.removesuffix(".webp").partition("/")
            name, kind = spoken.get(file, f"?{file}"), ""
            if noun == "photo":
                said = photographs()[0][folder]
                name, kind = said.text or f"?{folder}", said.kind
            found.setdefault(name, []).append((kind, archive.read(entry)))
    return found


@cache
def _groups(noun: str) -> dict[str, str]:
    """The group of every listed name."""
    if noun == "photo":
        return {name.text: name.group for name in photographs()[0].values() if name.text}
    return dict.fromkeys(emoji(), "emoji")


def _look(rng: random.Random, data: bytes) -> Image.Image:
    """A photograph with other light, turned over, or a part of it."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    w, h = image.size
    part = rng.uniform(0.65, 1)
    x, y = rng.uniform(0, (1 - part) * w), rng.uniform(0, (1 - part) * h)
    image = image.crop((round(x), round(y), round(x + part * w), round(y + part * h)))
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(0.7, 1.3))
    return image


def _photo(rng: random.Random, ground: Image.Image, data: bytes, place: Square, held: bool) -> Box:
    """Put a photograph into the square, perhaps with round corners or a border."""
    x, y, side = place
    image = Image.open(io.BytesIO(data)).convert("RGB") if held else _look(rng, data)
    scale = side / max(image.size)
    size = max(8, round(image.width * scale)), max(8, round(image.height * scale))
    image = image.resize(size, Image.Resampling.BICUBIC)
    shape = Image.new("L", size, 255)
    u = rng.random()
    if u < 0.3:
        shape.paste(0, (0, 0, *size))
        corner = min(size) * (0.5 if u < 0.06 else rng.uniform(0.05, 0.2))
        ImageDraw.Draw(shape).rounded_rectangle((0, 0, size[0] - 1, size[1] - 1), corner, 255)
    elif u < 0.45:
        ImageDraw.Draw(image).rectangle((0, 0, *size), outline=hsv(rng, (0, 0.3), (0, 1)), width=3)
    left, top = round(x), round(y)
    ground.paste(image, (left, top), shape)
    return left, top, left + size[0], top + size[1]


def _emoji(rng: random.Random, ground: Image.Image, data: bytes, place: Square, held: bool) -> Box:
    x, y, side = round(place[0]), round(place[1]), max(8, round(place[2]))
    image = Image.open(io.BytesIO(data)).convert("RGBA")
    if not held and rng.random() < 0.2:
        image = image.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC)
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    ground.paste(image, (x, y), image)
    ink = image.getchannel("A").point(lambda v: 255 if v > 60 else 0).getbbox()
    left, top, right, bottom = ink or (0, 0, side, side)
    return x + left, y + top, x + right, y + bottom


def _missing(rng: random.Random, things: Sequence[_Thing], noun: str, apart: bool) -> str:
    """A name that is not there. apart: of another group, since shops show other goods beside what is meant."""
    groups = _groups(noun)
    have = {thing.name for thing in things}
    near = {groups[name] for name in have if name} if apart and noun == "photo" else set()
    absent = [name for name in groups if name not in have]
    return rng.choice([name for name in absent if groups[name] not in near] or absent)


def _words(rng: random.Random, name: str) -> str:
    return rng.choice([name, name, *photographs()[1].get(name, [])])


def _with_article(words: str) -> str:
    bare = words.endswith(("s", "milk", "juice", "yogurt", "yoghurt", "cream", "bread", "rice"))
    return words if bare else with_article(words)


def _this(rng: random.Random, things: Sequence[_Thing], noun: str) -> list[Ask]:
    asks = []
    for thing in rng.sample(things, min(4, len(things))):
        kind, said = (f"{noun} name", thing.name) if thing.name else (f"{noun} outside", UNKNOWN)
        ref = thing.box if rng.random() < 0.5 else centre(thing.box)
        refs = () if len(things) == 1 and rng.random() < 0.8 else (ref,)
        asks.append(replace(tell(rng, kind, _HERE if refs else _ALONE, said, noun=noun), refs=refs))
        if thing.kind:
            kinds = tell(rng, f"{noun} kind", _KIND, thing.kind, n=_words(rng, thing.name))
            asks.append(replace(kinds, refs=refs))
    return asks


def _seek(rng: random.Random, things: Sequence[_Thing], noun: str, skill: str, width: int) -> Ask:
    listed = [thing.name for thing in things if thing.name]
    there = bool(listed) and rng.random() < 0.85
    name = rng.choice(listed) if there else _missing(rng, things, noun, True)
    boxes = [thing.box for thing in things if thing.name == name]
    words = _words(rng, name)
    said = rng.choice(("{n}", "{n}", "the {n}", "{n} " + noun)).format(n=words)
    if rng.random() < 0.06:
        said, boxes = rng.choice((noun, noun + "s", f"all {noun}s")), [t.box for t in things]
    kind = f"{noun} {skill}" if boxes else "absent"
    return find(skill, kind, said, in_order(boxes, width, centre))


def _presence(rng: random.Random, things: Sequence[_Thing], noun: str) -> list[Ask]:
    listed = sorted({thing.name for thing in things if thing.name})
    there = bool(listed) and rng.random() < 0.5
    name = rng.choice(listed) if there else _missing(rng, things, noun, rng.random() < 0.75)
    ways = _THERE.format(n=_with_article(_words(rng, name)))
    asks = [tell(rng, f"{noun} presence", ways, "yes" if there else "no")]
    shown = rng.sample(listed, min(len(listed), rng.randint(0, 2)))
    options = {*shown, *(_missing(rng, things, noun, True) for _ in range(3 - len(shown)))}
    order = rng.sample(sorted(options), len(options))
    said = ", ".join(name for name in order if name in shown) or "none"
    return [*asks, tell(rng, f"{noun} which", _WHICH, said, list=", ".join(order))]


def _amounts(rng: random.Random, things: Sequence[_Thing], noun: str) -> Ask:
    listed = [thing.name for thing in things if thing.name]
    if listed and rng.random() < 0.6:
        name = rng.choice(listed)
        return tell(rng, f"{noun} count", _SOME, str(listed.count(name)), n=name, noun=noun)
    return tell(rng, f"{noun} count", _EVERY, str(len(things)), noun=noun)


def _caption(things: Sequence[_Thing], noun: str, width: int) -> list[Ask]:
    names = [thing.name for thing in in_order(things, width, lambda thing: centre(thing.box))]
    if not all(names) or len(names) > 5:
        return []
    text = f"{noun.capitalize()}{'s' * (len(names) > 1)}: {', '.join(names)}."
    return [Ask("caption", f"{noun} caption", "short", text)]


def _draw(rng: random.Random, width: int, height: int, held: bool, noun: str) -> Picture:
    files = _files(noun, held)
    put = _photo if noun == "photo" else _emoji
    ground, _ = draw_ground(rng, width, height, plain=0.6)
    places = layout(rng, width, height, _SMALLEST[noun] * rng.uniform(1, 2))[:12]
    names, others = (
        [n for n in sorted(files) if n.startswith("?") == out] for out in (False, True)
    )
    pool = rng.sample(names, min(len(names), rng.choice((2, 4, 8, 20))))
    fills = noun == "photo" and rng.random() < 0.3 and max(width, height) < 1.6 * min(width, height)
    things = []
    for place in places[:1] if fills else places:
        name = rng.choice(others if rng.random() < OUTSIDE else pool)
        kind, data = rng.choice(files[name])
        if fills:
            image = Image.open(io.BytesIO(data)).convert("RGB") if held else _look(rng, data)
            ground = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
            box: Box = (0, 0, width, height)
        else:
            box = put(rng, ground, data, place, held)
        things.append(_Thing("" if name in others else name, kind, box))
    asks = _this(rng, things, noun) + _presence(rng, things, noun) + _caption(things, noun, width)
    asks += [_seek(rng, things, noun, skill, width) for skill in ("detect", "point")]
    if not fills:
        asks.append(_amounts(rng, things, noun))
    if rng.random() < 0.3:
        asks.append(off_topic(rng))
    marks = [Mark(thing.box, f"{noun} {thing.name or OTHER}") for thing in things]
    return Picture(np.asarray(ground), asks, marks, complete=noun == "emoji")


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    return _draw(rng, width, height, held, "photo")


def draw_emoji(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    return _draw(rng, width, height, held, "emoji")
