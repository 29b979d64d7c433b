"""One photograph or emoji, or several on a ground: what they are, which are there, where and how many."""

import io
import random
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps

from training.domains.ground import draw_ground, hsv, ink_box
from training.domains.icons.draw import Square, layout
from training.domains.photos.names import OTHER, UNKNOWN, emoji, photographs
from training.domains.phrasing import off_topic, tell
from training.domains.picture import Ask, Box, Mark, Picture, centre, find, in_order
from training.domains.text.fonts import sources
from training.scenes.phrases import with_article

OUTSIDE = 0.22  # share of the things that are outside the list, for the figures
TAUGHT_OUTSIDE = {"photo": 0.3, "emoji": 0.14}  # and in training
STRANGE = 0.35  # of the photographs outside the list: what nobody photographed
_SIDES = tuple(Image.Transpose)
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
    """name: "" outside the list; label: the helper head's class."""

    name: str
    kind: str
    label: str
    box: Box


# Kind, label and WebP by name; "?" comes before what is outside the list.
Files = dict[str, list[tuple[str, str, bytes]]]


@cache
def _files(noun: str, held: bool) -> Files:
    spoken = {key.replace("-", ""): name for name, keys in emoji().items() for key in keys}
    found: Files = {}
    with zipfile.ZipFile(sources() / ("held" if held else ".") / f"{noun}s.zip") as archive:
        for entry in archive.namelist():
            folder, _, file = entry.removesuffix(".webp").partition("/")
            name, kind, label = spoken.get(file, f"?{file}"), "", spoken.get(file, OTHER)
            if noun == "photo":
                said = photographs()[0][folder]
                name, kind, label = said.text or f"?{folder}", said.kind, said.label
            found.setdefault(name, []).append((kind, label, archive.read(entry)))
    return found


@cache
def _groups(noun: str, listed: bool = True) -> dict[str, str]:
    """The group of every listed name, or of all."""
    if noun == "photo":
        every = {name.text or f"?{key}": name.group for key, name in photographs()[0].items()}
        return {name: group for name, group in every.items() if name[0] != "?" or not listed}
    return dict.fromkeys(emoji(), "emoji")


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _look(rng: random.Random, image: Image.Image, group: str = "") -> Image.Image:
    """A photograph in other light, turned, or a part of it: few photographs of a kind must teach what it looks like.

    The edges of clothes and cards tell what they are, so little is cut off and nothing hidden. A heap of produce looks
    alike from every side, near and far. A third is nearly whole, as the photographs of the figures are.
    """
    whole, heap = group in ("clothes", "cards"), group == "produce"
    straight = rng.random() < 0.35
    if rng.random() < 0.5:
        image = ImageOps.mirror(image)
    if heap and rng.random() < 0.6:
        image = image.transpose(rng.choice(_SIDES))
    w, h = image.size
    least = 0.8 if whole else 0.85 if straight else 0.35 if heap else 0.5
    part, lean = rng.uniform(least, 1), rng.uniform(0.85, 1.15)
    turned = not straight and rng.random() < 0.6
    if turned:
        part = min(part, 0.85 if whole else 0.72)  # so that no corner is empty
        image = image.rotate(rng.uniform(-25, 25), Image.Resampling.BILINEAR)
    across, down = min(w, part * w * lean), min(h, part * h / lean)
    edge = 0.1 if turned and not whole else 0.0
    x, y = (
        rng.uniform(min(edge * side, (side - size) / 2), max((1 - edge) * side - size, (side - size) / 2))
        for side, size in ((w, across), (h, down))
    )  # fmt: skip
    image = image.crop((round(x), round(y), round(x + across), round(y + down)))
    if rng.random() < 0.3:  # from afar
        small = [max(24, round(side * rng.uniform(0.35, 0.8))) for side in image.size]
        image = image.resize((small[0], small[1]), Image.Resampling.BILINEAR).resize(image.size)
    image = _lit(rng, image)
    if rng.random() < 0.6:  # warmer or colder light
        gains = [rng.uniform(0.8, 1.2) for _ in range(3)]
        image = image.point(
            [min(255, round(level * gain)) for gain in gains for level in range(256)]
        )
    for _ in range(0 if whole else rng.choice((0, 0, 0, 1, 1, 2))):  # something stands before it
        wide, high = (max(2, round(side * rng.uniform(0.15, 0.45))) for side in image.size)
        at = rng.randint(0, image.width - wide), rng.randint(0, image.height - high)
        image.paste(hsv(rng, (0, 1), (0, 1)), (*at, at[0] + wide, at[1] + high))
    return image


def _lit(rng: random.Random, image: Image.Image) -> Image.Image:
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(0.6, 1.4))
    return image


def _redrawn(rng: random.Random, image: Image.Image) -> Image.Image:
    """An emoji as another set may draw it: in other shades and proportions, leaning, or with softer edges."""
    if rng.random() < 0.5:
        shades = _lit(rng, image.convert("RGB"))
        shades.putalpha(image.getchannel("A"))
        image = shades
    if rng.random() < 0.3:
        image = image.rotate(rng.uniform(-15, 15), Image.Resampling.BICUBIC)
    if rng.random() < 0.4:
        size = round(image.width * rng.uniform(0.75, 1)), round(image.height * rng.uniform(0.75, 1))
        image = ImageOps.pad(image.resize(size), image.size)
    return image.filter(ImageFilter.BoxBlur(1)) if rng.random() < 0.2 else image


def _shuffled(rng: random.Random, image: Image.Image) -> Image.Image:
    n = rng.choice((2, 3, 4))
    w, h = image.width // n, image.height // n
    places = [(i % n * w, i // n * h) for i in range(n * n)]
    pieces = [image.crop((x, y, x + w, y + h)) for x, y in places]
    rng.shuffle(pieces)
    for piece, place in zip(pieces, places, strict=True):
        image.paste(ImageOps.mirror(piece) if rng.random() < 0.5 else piece, place)
    return image


def _tinted(rng: random.Random, image: Image.Image) -> Image.Image:
    """Towards blue or purple, of which no listed produce is: shapes alone don't tell what it is."""
    hue, share, light = rng.randint(165, 240), rng.uniform(0.3, 1), rng.uniform(0.4, 0.9)
    h, s, v = image.convert("HSV").split()
    parts = (h.point(lambda level: hue + (level - 128) // 8), s.point(lambda level: 30 + share * level),
             v.point(lambda level: light * level))  # fmt: skip
    return Image.blend(image, Image.merge("HSV", parts).convert("RGB"), rng.uniform(0.35, 0.75))


def _strange(rng: random.Random, files: Files) -> Image.Image:
    """What no list has: a photograph in shuffled pieces, two at once, produce in other colours, or a pattern."""
    u, groups = rng.random(), _groups("photo")
    produce = [n for n in sorted(files) if groups.get(n) == "produce" and n != "aubergine"]
    names = produce if u < 0.5 and produce else sorted(files)
    names = rng.sample(names, min(2, len(names)))
    first, second = (_open(rng.choice(files[name])[-1]) for name in (names[0], names[-1]))
    first = _look(rng, first, "produce" if u < 0.5 else "")
    if u < 0.5:
        return _tinted(rng, first)
    if u < 0.7:
        return Image.blend(first, _look(rng, second).resize(first.size), rng.uniform(0.4, 0.6))
    if u < 0.85:
        return _shuffled(rng, first)
    n = rng.randint(2, 24)
    dark, light = (hsv(rng, (0, 0.8), (0.1, 1)) for _ in range(2))
    noise = Image.frombytes("L", (n, n), rng.randbytes(n * n)).resize(
        (110, 110), Image.Resampling.BICUBIC
    )
    return ImageOps.colorize(noise, dark, light)


def _photo(rng: random.Random, ground: Image.Image, image: Image.Image, place: Square) -> Box:
    """Put a photograph into the square, perhaps with round corners or a border."""
    x, y, side = place
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
    image = image if held else _redrawn(rng, image)
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    ground.paste(image, (x, y), image)
    return ink_box(image.getchannel("A"), x, y)


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


def _this(rng: random.Random, things: Sequence[_Thing], noun: str, most: int) -> list[Ask]:
    asks = []
    for thing in rng.sample(things, min(most, len(things))):
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
    ground, _ = draw_ground(rng, width, height, plain=0.6)
    places = layout(rng, width, height, _SMALLEST[noun] * rng.uniform(1, 2))[:12]
    names, others = (
        [n for n in sorted(files) if n.startswith("?") == out] for out in (False, True)
    )
    outside = OUTSIDE if held else TAUGHT_OUTSIDE[noun]
    groups = _groups(noun, listed=False)
    # In training, what looks most like something listed is more likely.
    near = {"produce": 2, "clothes": 5}
    likely = [n for n in others for _ in range(1 if held else 1 + near.get(groups.get(n, ""), 0))]
    pool = rng.sample(names, min(len(names), rng.choice((2, 4, 8, 20))))
    fills = noun == "photo" and rng.random() < 0.3 and max(width, height) < 1.6 * min(width, height)
    things = []
    for place in places[:1] if fills else places:
        name = rng.choice(likely if rng.random() < outside else pool)
        kind, label, data = rng.choice(files[name])
        if noun == "emoji":
            box = _emoji(rng, ground, data, place, held)
        else:
            strange = not held and name in others and rng.random() < STRANGE
            image, label = (_strange(rng, files), OTHER) if strange else (_open(data), label)
            image = image if held or strange else _look(rng, image, groups[name])
            box = (0, 0, width, height)
            if fills:
                ground = ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC)
            else:
                box = _photo(rng, ground, image, place)
        things.append(_Thing("" if name in others else name, kind, label, box))
    asks = (
        _this(rng, things, noun, 4 if held else 10)
        + _presence(rng, things, noun)
        + _caption(things, noun, width)
    )
    asks += [_seek(rng, things, noun, skill, width) for skill in ("detect", "point")]
    if not fills:
        asks.append(_amounts(rng, things, noun))
    if rng.random() < 0.3:
        asks.append(off_topic(rng))
    marks = [Mark(thing.box, f"{noun} {thing.label}") for thing in things]
    return Picture(np.asarray(ground), asks, marks, complete=noun == "emoji")


draw, draw_emoji = partial(_draw, noun="photo"), partial(_draw, noun="emoji")
