"""Greedy answers of a model in training, scored by kind; the figures after a slice, and its worst pictures."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from kestrel_client.commands.evaluation.place_metrics import iou
from training.domains.picture import Ask, Box, Picture, Point
from training.images.resize import crops, normalise
from training.kestrel_small import VIEW
from training.learning.model import Moondream, prompt_mask
from training.mixture import DOMAINS, draw_picture, draw_size
from training.prompts import COORD, EOS, SIZE
from training.scenes.paths import path_polygon, polygon_iou
from training.scenes.tiling import View
from training.writing import opening, write, writer

ROOM = 120  # ids of an answer
ASKS = 7  # of a picture
# What issue 40 wants, by kind of request.
BARS = {
    "text read": 0.97, "text line": 0.97, "text here": 0.97, "text receipt total": 0.94, "charts value": 0.88,
    "charts label": 0.95, "webcharts value": 0.88, "icons name": 0.80, "icons detect": 0.90, "screens click": 0.93,
    "screens elements": 0.90, "shapes detect": 0.98, "shapes count": 0.97, "shapes segment": 0.92,
    "shapes caption short": 0.96, "absent": 0.97, "off topic": 0.97,
}  # fmt: skip


@dataclass
class Reply:
    """What the model said to one request: text, or numbers in shares of the picture."""

    ask: Ask
    room: int = ROOM  # ids that it may have: some more than the truth
    ids: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    sizes: list[tuple[float, float]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return str(writer().tokenizer.decode(self.ids))

    def points(self, width: int, height: int) -> list[Point]:
        pairs = zip(self.numbers[::2], self.numbers[1::2], strict=False)
        return [(x * width, y * height) for x, y in pairs]

    def boxes(self, width: int, height: int) -> list[Box]:
        found = []
        for (x, y), (w, h) in zip(self.points(width, height), self.sizes, strict=False):
            w, h = w * width / 2, h * height / 2
            found.append((x - w, y - h, x + w, y + h))
        return found


def held_out(per_domain: int, seed: int = 977) -> list[tuple[str, Picture]]:
    """(domain, picture) with fonts and icon sets that training never uses."""
    found = []
    for name in DOMAINS:
        for number in range(per_domain):
            rng = random.Random(f"held/{seed}/{name}/{number}")
            picture = draw_picture(rng, name, draw_size(rng, 0.5), held=True)
            rng.shuffle(picture.asks)
            found.append((name, picture))
    return found


class _Row:
    """One picture's requests, packed with room for the answers."""

    def __init__(self, picture: Picture, image: Tensor, asks: list[Ask]) -> None:
        height, width = picture.pixels.shape[:2]
        prompts = [opening(ask, width, height) for ask in asks]
        rooms = [
            min(len(write(a, width, height).ids) - len(p.ids) + 12, ROOM)
            for a, p in zip(asks, prompts, strict=True)
        ]
        self.image = image
        self.replies = [Reply(ask, room) for ask, room in zip(asks, rooms, strict=True)]
        length = sum(len(p.ids) for p in prompts) + sum(rooms)
        self.ids = torch.zeros(length, dtype=torch.long)
        self.values = torch.zeros(length, 2)
        self.document = torch.full((length,), -1)
        self.position = torch.zeros(length, dtype=torch.long)
        self.last: list[int] = []
        at = 0
        for number, (prompt, room) in enumerate(zip(prompts, rooms, strict=True)):
            n = len(prompt.ids)
            self.ids[at : at + n] = torch.tensor(prompt.ids)
            self.values[at : at + n] = torch.tensor(prompt.values)
            self.document[at : at + n] = number
            self.position[at : at + n + room] = torch.arange(VIEW.prefix, VIEW.prefix + n + room)
            self.last.append(at + n - 1)
            at += n + room

    def feed(self, number: int, token: int, value: tuple[float, float] = (0.0, 0.0)) -> None:
        self.last[number] += 1
        at = self.last[number]
        self.ids[at], self.document[at] = token, number
        self.values[at] = torch.tensor(value)


def _advance(
    row: _Row, number: int, word: int, go_on: bool, coord: int, size: tuple[int, int]
) -> None:
    """One step of the engine's state machines."""
    reply = row.replies[number]
    skill, numbers = reply.ask.skill, reply.numbers
    path = skill == "segment" and reply.sizes
    if skill in ("query", "caption") or path:
        used = len(reply.ids) + len(numbers) + len(reply.sizes)
        reply.done = word == EOS or used >= reply.room - 1
        if not reply.done:
            reply.ids.append(word)
            row.feed(number, word)
        return
    fresh = len(numbers) % 2 == 0 and (skill == "point" or len(reply.sizes) == len(numbers) // 2)
    if fresh and (not go_on or len(numbers) + len(reply.sizes) + 3 >= reply.room):
        reply.done = True
    elif len(numbers) % 2 or fresh:
        value = coord / 1024
        numbers.append(value)
        row.feed(number, COORD, (value, 0.0))
    else:
        w, h = (2 ** (10 * s / 1023 - 10) for s in size)
        reply.sizes.append((w, h))
        row.feed(number, SIZE, (w, h))


@torch.no_grad()
def answer(
    model: Moondream, pictures: list[Picture], device: torch.device, rows: int = 32
) -> list[list[Reply]]:
    """Greedy replies to at most ASKS requests of each picture."""
    found = []
    for picture in pictures:
        pixels = torch.from_numpy(np.array(picture.pixels)).to(device)
        pixels = pixels.permute(2, 0, 1)[None].float()
        view = View.of(pixels.shape[3], pixels.shape[2], VIEW)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            image = model.vision(normalise(crops(pixels, view)), view)[0]
        found.append(_Row(picture, image, picture.asks[:ASKS]))
    for _ in range(ROOM):
        open_rows = [row for row in found if not all(r.done for r in row.replies)]
        if not open_rows:
            break
        for start in range(0, len(open_rows), rows):
            _step(model, open_rows[start : start + rows], device)
    return [row.replies for row in found]


def _step(model: Moondream, rows: list[_Row], device: torch.device) -> None:
    used = [max(row.last) + 1 for row in rows]
    n = -(-(VIEW.prefix + max(used)) // 8) * 8 - VIEW.prefix  # fast attention wants multiples of 8

    def padded(parts: list[Tensor], fill: int) -> Tensor:
        out = parts[0].new_full((len(parts), n, *parts[0].shape[1:]), fill)
        for i, part in enumerate(parts):
            out[i, : min(n, len(part))] = part[:n]
        return out.to(device)

    ids, values = padded([r.ids for r in rows], 0), padded([r.values for r in rows], 0)
    document, position = (
        padded([r.document for r in rows], -1),
        padded([r.position for r in rows], 0),
    )
    replies = [(i, k, reply) for i, row in enumerate(rows) for k, reply in enumerate(row.replies)]
    open_ones = [(i, k, rows[i].last[k]) for i, k, reply in replies if not reply.done]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        image = torch.stack([row.image for row in rows])
        mask = torch.where(prompt_mask(document, VIEW.prefix), 0.0, float("-inf")).to(image.dtype)
        hidden = model.decode(image, ids, values, position, mask)
        picked = hidden[[i for i, _, _ in open_ones], [at for _, _, at in open_ones]]
        words = model.text.logits(picked).float()
        coords = model.region.coord_logits(picked).argmax(-1).tolist()
        sizes = model.region.size_logits(picked).argmax(-1).tolist()
    go_on = (words[:, COORD] > words[:, EOS]).tolist()
    words[:, [COORD, SIZE]] = float("-inf")
    best = words.argmax(-1).tolist()
    for j, (i, k, _) in enumerate(open_ones):
        _advance(rows[i], k, best[j], go_on[j], coords[j], tuple(sizes[j]))


def distance(a: str, b: str) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def _matched(found: list[Any], wanted: list[Box], score: Any, least: float) -> int:
    left = list(wanted)
    hits = 0
    for thing in found:
        best = max(left, key=lambda box: score(thing, box), default=None)
        if best is not None and score(thing, best) >= least:
            left.remove(best)
            hits += 1
    return hits


def score(reply: Reply, width: int, height: int) -> tuple[float, float]:
    """(won, possible): their sums over a kind give its figure. Detect and point count 2 hits over found plus wanted."""
    ask = reply.ask
    if ask.skill == "query" and ask.kind.removeprefix("web").startswith("charts value"):
        try:
            true, said = (float(t.strip("%")) for t in (ask.answer, reply.text))
        except ValueError:
            return 0, 1
        return float(abs(said - true) <= 0.05 * abs(true)), 1
    if ask.skill in ("query", "caption") and ask.spelled:
        return max(0, len(ask.answer) - distance(reply.text, ask.answer)), len(ask.answer)
    if ask.skill in ("query", "caption"):
        return float(reply.text.strip() == ask.answer), 1
    if not ask.boxes:
        return float(not reply.numbers), 1
    if ask.skill == "segment":
        boxes = reply.boxes(width, height)[:1]
        drawn = _outline(reply.text.split(), boxes[0]) if boxes else None
        wanted = _outline(ask.path, ask.boxes[0])
        return (0.0 if drawn is None or wanted is None else polygon_iou(wanted, drawn)), 1
    if ask.skill == "detect":
        boxes = reply.boxes(width, height)
        return 2.0 * _matched(boxes, list(ask.boxes), iou, 0.5), len(boxes) + len(ask.boxes)
    points = reply.points(width, height)
    inside = lambda p, b: float(b[0] <= p[0] <= b[2] and b[1] <= p[1] <= b[3])  # noqa: E731
    return 2.0 * _matched(points, list(ask.boxes), inside, 1.0), len(points) + len(ask.boxes)


def _outline(path: Sequence[str], box: Box) -> NDArray[np.float64] | None:
    """The polygon of path tokens in the 960-unit box."""
    return path_polygon(" ".join(str(int(t) / 960) if t.isdigit() else t for t in path), box)


Judged = tuple[str, Picture, Reply, float]


def judge(
    model: Moondream, examples: list[tuple[str, Picture]], device: torch.device
) -> tuple[dict[str, Any], list[Judged]]:
    """The figures {kind: {score, exact, n, bar}}, and every reply with its share of what was possible."""
    was_training = model.training
    model.eval()
    replies = answer(model, [picture for _, picture in examples], device)
    model.train(was_training)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    judged = []
    for (name, picture), row in zip(examples, replies, strict=True):
        height, width = picture.pixels.shape[:2]
        for reply in row:
            won, possible = score(reply, width, height)
            share = won / possible if possible else 1.0
            for key in (reply.ask.kind, f"{name}: all"):
                each = sums[key]
                one = key.endswith(": all")
                each[0] += share if one else won
                each[1] += 1 if one else possible
                each[2] += share >= 0.9999
                each[3] += 1
            judged.append((name, picture, reply, share))
    figures = {
        kind: {
            "score": round(won / max(possible, 1e-9), 4),
            "exact": round(exact / n, 4),
            "n": int(n),
            "bar": BARS.get(kind),
        }
        for kind, (won, possible, exact, n) in sorted(sums.items())
    }
    return figures, judged


def table(figures: dict[str, Any]) -> str:
    lines = [f"{'kind':28} {'score':>7} {'exact':>7} {'n':>5} {'bar':>6}"]
    for kind, f in figures.items():
        bar = "" if f["bar"] is None else f"{100 * f['bar']:.0f}"
        lines.append(
            f"{kind:28} {100 * f['score']:7.1f} {100 * f['exact']:7.1f} {f['n']:5} {bar:>6}"
        )
    return "\n".join(lines)


def gallery(judged: list[Judged], count: int = 20) -> Image.Image:
    """The worst replies, one a picture, domains in turn: truth in green, the model in red."""
    by_domain: dict[str, list[Judged]] = defaultdict(list)
    seen: set[int] = set()
    for one in sorted(judged, key=lambda j: j[3]):
        if id(one[1]) not in seen:
            seen.add(id(one[1]))
            by_domain[one[0]].append(one)
    chosen = [one for group in by_domain.values() for one in group[: count // len(by_domain)]]
    side, text = 360, 62
    sheet = Image.new("RGB", (5 * side, -(-len(chosen) // 5) * (side + text)), (60, 60, 60))
    pen = ImageDraw.Draw(sheet)
    for number, (_, picture, reply, share) in enumerate(chosen):
        height, width = picture.pixels.shape[:2]
        image = Image.fromarray(np.array(picture.pixels))
        draw = ImageDraw.Draw(image)
        for box in reply.ask.boxes:
            draw.rectangle(box, outline=(0, 180, 0))
        for x0, y0, x1, y1 in reply.boxes(width, height):
            draw.rectangle((x0, y0, max(x0, x1), max(y0, y1)), outline=(255, 0, 0))
        for x, y in reply.points(width, height):
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=(255, 0, 0))
        image.thumbnail((side - 4, side - 4))
        x, y = number % 5 * side, number // 5 * (side + text)
        sheet.paste(image, (x + 2, y + 2))
        ask, said = reply.ask, f"{len(reply.numbers) // 2} found"
        said = reply.text if ask.skill in ("query", "caption") else said
        lines = (f"{ask.kind} {share:.2f}: {ask.text}", f"true: {ask.answer!r}", f"said: {said!r}")
        for i, line in enumerate(lines):
            line = line.encode("ascii", "replace").decode()[:58]
            pen.text((x + 3, y + side + 2 + 19 * i), line, (255, 255, 255))
    return sheet
