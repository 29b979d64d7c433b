"""Held-out pictures: what training never draws, with requests that have a bar first.

python -m training.held_out FOLDER      # the sets of ``kestrel eval``; that command has those of --each 30 --seed 40
"""

import argparse
import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from kestrel_client.commands.evaluation.answers import placed
from training.domains.picture import Ask, Box, Picture, Pixels, as_numpy
from training.mixture import draw_picture, draw_size

# What issue 40 wants, by kind of request.
BARS = {
    "text read": 0.97, "text line": 0.97, "text here": 0.97, "text receipt total": 0.94, "charts value": 0.88,
    "charts label": 0.95, "webcharts value": 0.88, "icons name": 0.80, "icons detect": 0.90, "screens click": 0.93,
    "screens elements": 0.90, "shapes detect": 0.98, "shapes count": 0.97, "shapes segment": 0.92,
    "shapes caption short": 0.96, "absent": 0.97, "off topic": 0.97, "photo name": 0.88,
    "photo outside": 0.90, "emoji name": 0.80,
}  # fmt: skip
SETS = {
    "scenes": ("shapes",), "text": ("text",), "charts": ("charts", "webcharts"), "icons": ("icons",),
    "screens": ("screens",),
}  # fmt: skip
"""The sets of ``kestrel eval``, and the domains that draw their pictures."""
ASKS = 7  # of a picture
# Kinds whose figures need more pictures than the others, and how many pictures ask for the first of them.
MORE: dict[str, tuple[tuple[str, ...], int]] = {
    "shapes": (("shapes caption short",), 60), "text": (("text receipt total",), 20),
    "webcharts": (("webcharts label",), 60), "photos": (("photo outside", "photo name"), 60),
}  # fmt: skip
MOST_DRAWN = 400  # pictures of a domain, to find those


def held_out(each: int, domains: Sequence[str], seed: int = 977) -> list[tuple[str, Picture]]:
    """(domain, picture) with fonts and icon sets that training never uses; requests with bars first, two of a kind."""
    return [
        (name, _draw(f"{seed}/{name}/{n}", name, 0.175)) for name in domains for n in range(each)
    ]


def held_out_more(
    examples: Sequence[tuple[str, Picture]], seed: int = 977
) -> list[tuple[str, Picture]]:
    """Further pictures of the examples' domains, of one crop, which ask for the kinds of MORE alone."""
    found = []
    for name, (kinds, most) in MORE.items():
        own = [picture for domain, picture in examples if domain == name]
        have = sum(_asks_for(picture, kinds[0]) for picture in own)
        for number in range(MOST_DRAWN if own else 0):
            if have >= most:
                break
            picture = _draw(f"{seed}/more/{name}/{number}", name, 0)
            if _asks_for(picture, kinds[0]):
                have += 1
                asks = [ask for ask in picture.asks if ask.kind in kinds]
                found.append((name, replace(picture, asks=asks[:4])))
    return found


def _asks_for(picture: Picture, kind: str) -> bool:
    return any(ask.kind == kind for ask in picture.asks)


def _draw(seed: str, name: str, tiled: float) -> Picture:
    rng = random.Random(f"held/{seed}")
    picture = draw_picture(rng, name, draw_size(rng, tiled), held=True)
    rng.shuffle(picture.asks)
    return replace(picture, asks=_bars_first(picture.asks))


def _bars_first(asks: list[Ask]) -> list[Ask]:
    seen = Counter[str]()
    keys = []
    for ask in asks:
        keys.append((seen[ask.kind] > 1, ask.kind not in BARS))
        seen[ask.kind] += 1
    return [asks[i] for i in sorted(range(len(asks)), key=keys.__getitem__)]


def request_of(ask: Ask, width: int, height: int) -> dict[str, Any]:
    """The request as ``kestrel eval`` reads it from a row, and what is right; coordinates as fractions of the image."""

    def fractions(values: Sequence[float]) -> list[float]:
        return [round(float(v) / (width, height)[i % 2], 5) for i, v in enumerate(values)]

    row: dict[str, Any] = {"skill": ask.skill, "kind": ask.kind, "text": ask.text}
    if ask.skill in ("query", "reasoning", "caption"):
        value = ask.kind.removeprefix("web").startswith("charts value")
        metric = "within 5 %" if value else "characters" if ask.spelled else "accuracy"
        row |= {"skill": "query", "metric": metric, "answer": ask.answer}
    outlines = ask.outlines
    if ask.skill == "segment" and not outlines and ask.path:
        outlines = (path_outline(ask.path, ask.boxes[0]),)
    lists: dict[str, Sequence[Any]] = {
        "boxes": ask.boxes,
        "outlines": [o.ravel() for o in outlines],
        "refs": ask.refs,
    }
    return row | {name: list(map(fractions, those)) for name, those in lists.items() if those}


def path_outline(tokens: Sequence[str], box: Box) -> NDArray[np.float64]:
    """The corners [n, 2] of path tokens, which are in the 960-unit box of ``box``."""
    path = " ".join(str(int(t) / 960) if t.isdigit() else t for t in tokens)
    return np.array(placed(path, box)[0])


def write_set(folder: Path, name: str, each: int, seed: int) -> None:
    """Write ``each`` pictures and ``rows.jsonl``. Captions are left out: other models word them in other ways."""
    folder.mkdir(parents=True, exist_ok=True)
    domains = SETS[name]
    rows = []
    for number, (_, picture) in enumerate(held_out(each // len(domains), domains, seed)):
        file = f"{number:03}.webp"
        Image.fromarray(picture.pixels).save(folder / file, quality=90, method=6)
        height, width = picture.pixels.shape[:2]
        asks = [ask for ask in picture.asks if ask.skill not in ("caption", "reasoning")]
        requests = [request_of(ask, width, height) for ask in asks[:ASKS]]
        for request in requests:
            request["kind"] = request["kind"].removeprefix(f"{domains[0]} ")
        rows.append(json.dumps({"image": file, "requests": requests}, ensure_ascii=False))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def worn(rng: random.Random, pixels: Pixels) -> Pixels:
    """Reduced in size and enlarged again, noisy and compressed, so that a model makes errors."""
    height, width = pixels.shape[:2]
    share = rng.uniform(0.4, 0.9)
    small = Image.fromarray(np.asarray(pixels)).resize((int(share * width), int(share * height)))
    noise = as_numpy(rng).normal(0, rng.uniform(2, 16), pixels.shape)
    noisy = np.clip(np.asarray(small.resize((width, height))) + noise, 0, 255).astype(np.uint8)
    data = io.BytesIO()
    Image.fromarray(noisy).save(data, "JPEG", quality=rng.randint(25, 70))
    return np.asarray(Image.open(data))


def write_labels(folder: Path, domains: Sequence[str], each: int, seed: int) -> None:
    """Write ``each`` pictures of a domain, every second one worn, and labels in COCO's form for ``calibrate``."""
    folder.mkdir(parents=True, exist_ok=True)
    categories: dict[str, int] = {}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (_, picture) in enumerate(held_out(each, domains, seed)):
        pixels = worn(random.Random(number), picture.pixels) if number % 2 else picture.pixels
        Image.fromarray(pixels).save(folder / f"{number}.png")
        height, width = pixels.shape[:2]
        image = {"id": number, "file_name": f"{number}.png", "width": width, "height": height}
        found = {a.text: a.boxes for a in picture.asks if a.skill in ("detect", "point")}
        numbers = {text: categories.setdefault(text, len(categories)) for text in found}
        images.append(
            {**image, "neg_category_ids": [numbers[t] for t, b in found.items() if not b]}
        )
        annotations += [
            {"id": 0, "image_id": number, "category_id": numbers[text], "bbox": [x0, y0, x1 - x0, y1 - y0]}
            for text, boxes in found.items()
            for x0, y0, x1, y1 in boxes
        ]  # fmt: skip
    named = [{"id": number, "name": text} for text, number in categories.items()]
    labels = {"images": images, "annotations": annotations, "categories": named}
    (folder / "annotations.json").write_text(json.dumps(labels), encoding="utf-8")


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path, help="gets a folder for each set")
    p.add_argument("--labels", action="store_true", help="labels for calibrate in place of sets")
    p.add_argument("--each", type=int, default=30, help="pictures of a set, or of a domain")
    p.add_argument("--seed", type=int, default=40)
    given = p.parse_args()
    if given.labels:
        domains = [domain for those in SETS.values() for domain in those]
        write_labels(given.folder, domains, given.each, given.seed)
        return
    for name in SETS:
        write_set(given.folder / name, name, given.each, given.seed)


if __name__ == "__main__":
    main()
