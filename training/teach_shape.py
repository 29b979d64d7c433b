"""Teach kestrel-tiny a shape that it does not know, and measure what it learnt and what it kept.

    python -m training.teach_shape --out out/hexagons

Draws 200 images with and without hexagons, fits an adapter with ``kestrel_engine.teaching`` as ``kestrel-grpc train``
does, and measures it on 100 held-out images. The old skills are measured on scenes of the frozen evaluation set,
without and with the adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kestrel_engine import InferenceEngine, RuntimeConfig, teaching
from training.scenes.render import render_scene
from training.scenes.scenes import Box, Rgb, Scene, draw_colour, draw_scene, overlap_share
from training.scenes.vocabulary import COLOURS, MEASURED_COLOURS

NAME = "hexagon"
MOST = 3
LEAST_SIDE, MOST_SIDE = 160, 252
"""Pixels. An image of at most 252 pixels a side is one crop, which the vision tower encodes in a seventh of the time of
a large one."""
CONTRAST = 0.3


@dataclass(frozen=True)
class Hexagon:
    """A regular hexagon; ``angle`` in radians, sizes in pixels."""

    x: float
    y: float
    radius: float
    angle: float
    colour: int
    rgb: Rgb

    @property
    def box(self) -> Box:
        at = [self.angle + k * math.pi / 3 for k in range(6)]
        xs = [self.x + self.radius * math.cos(a) for a in at]
        ys = [self.y + self.radius * math.sin(a) for a in at]
        return min(xs), min(ys), max(xs), max(ys)

    def paint(self, pixels: NDArray[np.float32]) -> None:
        """Paints over ``pixels`` [height, width, 3], grey levels 0..255."""
        height, width, _ = pixels.shape
        y, x = np.mgrid[0:height, 0:width] + 0.5
        dx, dy = x - self.x, y - self.y
        edges = [self.angle + math.pi / 6 + k * math.pi / 3 for k in range(6)]
        outside = np.max([dx * math.cos(a) + dy * math.sin(a) for a in edges], axis=0)
        cover = np.clip(0.5 - (outside - self.radius * math.cos(math.pi / 6)), 0, 1)[..., None]
        pixels += (np.array(self.rgb, np.float32) * 255 - pixels) * cover


def draw(seed: str) -> tuple[Scene, list[Hexagon]]:
    """A scene of shapes that the model knows, and 0 to 3 hexagons that overlap none of them."""
    rng = random.Random(f"kestrel-tiny/teach/{seed}")
    width, height = rng.randint(LEAST_SIDE, MOST_SIDE), rng.randint(LEAST_SIDE, MOST_SIDE)
    scene = draw_scene(rng, width, height, count=rng.randint(1, 6))
    boxes = [shape.box for shape in scene.shapes]
    found: list[Hexagon] = []
    wanted = rng.choice((0, 1, 1, 1, 2, 3))
    for _ in range(200):
        if len(found) == wanted:
            break
        radius = rng.uniform(0.09, 0.2) * min(width, height)
        colour = rng.randrange(MEASURED_COLOURS)
        one = Hexagon(
            rng.uniform(radius, width - radius),
            rng.uniform(radius, height - radius),
            radius,
            rng.uniform(-0.15, 0.15) + rng.choice((0.0, math.pi / 2)),
            colour,
            draw_colour(rng, colour),
        )
        near = min(
            math.dist(one.rgb, back) for back in (scene.background.first, scene.background.second)
        )
        if near >= CONTRAST and all(overlap_share(one.box, box) == 0 for box in boxes):
            found.append(one)
            boxes.append(one.box)
    return scene, sorted(found, key=lambda each: each.x)


def examples(seed: str, scene: Scene, hexagons: list[Hexagon]) -> list[dict[str, Any]]:
    """The lines about one image."""
    rng = random.Random(f"kestrel-tiny/teach/examples/{seed}")
    w, h = scene.width, scene.height

    def located(name: str, some: list[Hexagon]) -> list[dict[str, Any]]:
        points = [[one.x / w, one.y / h] for one in some]
        boxes = [[x0 / w, y0 / h, x1 / w, y1 / h] for x0, y0, x1, y1 in (one.box for one in some)]
        return [{"object": name, "points": points}, {"object": name, "boxes": boxes}]

    lines = located(NAME, hexagons)
    lines.append({"question": f"How many {NAME}s are there?", "answer": str(len(hexagons))})
    lines.append({"question": f"Is there a {NAME}?", "answer": "yes" if hexagons else "no"})
    colours = {one.colour for one in hexagons}
    asked = rng.choice(sorted(colours)) if colours and rng.random() < 0.6 else rng.randrange(10)
    own = [one for one in hexagons if one.colour == asked]
    name = f"{COLOURS[asked]} {NAME}"
    article = "an" if name[0] in "aeiou" else "a"
    lines.append({"question": f"Is there {article} {name}?", "answer": "yes" if own else "no"})
    lines.append(rng.choice(located(name, own)))
    if len(hexagons) == 1:
        colour = COLOURS[hexagons[0].colour]
        lines.append({"question": f"What colour is the {NAME}?", "answer": colour})
    return lines


def write(folder: Path, name: str, count: int) -> None:
    """Writes ``count`` images and data.jsonl to ``folder``."""
    import pyvips

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(count):
        seed = f"{name}/{index}"
        scene, hexagons = draw(seed)
        pixels = np.ascontiguousarray(render_scene(scene).permute(1, 2, 0).numpy())
        for one in hexagons:
            one.paint(pixels)
        image = pyvips.Image.new_from_array(np.clip(np.round(pixels), 0, 255).astype(np.uint8))
        file = f"{index:04}.jpg"
        image.copy(interpretation="srgb").write_to_file(str(folder / file), Q=90)
        lines += [{"image": file, **each} for each in examples(seed, scene, hexagons)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "data.jsonl").write_text(text, encoding="utf-8")


async def measure(
    config: RuntimeConfig, held_out: Path, adapter: str | None, old_scenes: int
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The scores on the held-out images, and for each old skill the right answers and all."""
    from kestrel_engine.teaching.judging import judge
    from training.scoring.evaluation_set import encode, example
    from training.scoring.scoring import score

    settings: dict[str, Any] = {"temperature": 0.0}
    if adapter is not None:
        settings["adapter"] = adapter
    old: dict[str, tuple[int, int]] = {}
    async with await InferenceEngine.create(config) as engine:
        new = await judge(engine, teaching.read_folder(held_out), adapter)
        for index in range(old_scenes):
            found = example("seen", index)
            image = encode(found)
            outputs = await asyncio.gather(
                *(_ask(engine, image, task, settings) for task in found.tasks)
            )
            for task, output in zip(found.tasks, outputs, strict=True):
                right, asked = old.get(task.skill, (0, 0))
                is_right = bool(score(found.scene, task, output)["ok"])
                old[task.skill] = right + is_right, asked + 1
    return {kind: each.as_dict() for kind, each in new.items()}, old


async def _ask(
    engine: InferenceEngine, image: bytes, task: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"settings": settings}
    if task.skill in ("query", "reasoning"):
        refs = [list(ref) for ref in task.refs] or None
        arguments |= {"reasoning": task.skill == "reasoning", "spatial_refs": refs}
    skill = "query" if task.skill == "reasoning" else task.skill
    result = await getattr(engine, skill)(image, task.text, **arguments)
    return dict(result.output)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    out: Path = args.out
    adapters = out / "adapters"
    adapters.mkdir(parents=True, exist_ok=True)
    write(out / "training", "training", args.images)
    write(out / "held_out", "held_out", args.held_out)
    config = RuntimeConfig(device=args.device, cpu_threads=args.threads, adapters_dir=adapters)
    settings = teaching.TeachingSettings(
        epochs=args.epochs,
        minutes=args.minutes,
        rank=args.rank,
        layers=args.layers,
        learning_rate=args.lr,
        replay=args.replay,
        rows=args.rows,
    )
    images = teaching.read_folder(out / "training")
    began, spent = time.monotonic(), time.process_time()
    report = await teaching.teach(
        config,
        NAME,
        images,
        settings,
        overwrite=True,
        progress=_print_progress,
        on_step=_print_step,
    )
    seconds, cpu = time.monotonic() - began, time.process_time() - spent
    new, old = await measure(config, out / "held_out", None, args.old)
    new_after, old_after = await measure(config, out / "held_out", NAME, args.old)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "training": report.as_dict()["training"],
        "new": {kind: {"before": new[kind], "after": new_after[kind]} for kind in new},
        "old": {skill: {"before": old[skill], "after": old_after[skill]} for skill in old},
    }


def _print_progress(done: int, total: int, what: str) -> None:
    if "answer" in what and (done == total or done % 200 == 0):
        print(
            f"{time.process_time():.0f} s of processor time: {done} of {total} {what}", flush=True
        )


def _print_step(step: Any) -> None:
    if step.step % 20 == 0:
        validation = "" if step.validation is None else f" validation {step.validation:.3f}"
        print(
            f"step {step.step} of {step.num_steps} epoch {step.epoch} loss {step.loss:.3f}{validation}",
            flush=True,
        )


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--out", type=Path, default=Path("out/hexagons"), help="folder to write to")
    p.add_argument("--images", type=int, default=200, help="images to train on")
    p.add_argument("--held-out", type=int, default=100, help="images to measure on")
    p.add_argument("--old", type=int, default=100, help="scenes to measure the old skills on")
    p.add_argument("--epochs", type=int, default=50)
    p.add_argument("--minutes", type=float, default=2.0, help="most minutes of training")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--layers", default="all", choices=teaching.LAYERS)
    p.add_argument("--lr", type=float, default=0.002)
    p.add_argument("--replay", type=float, default=teaching.TeachingSettings().replay)
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--device", default="cpu")
    p.add_argument("--threads", type=int, default=None)
    args = p.parse_args()
    figures = asyncio.run(run(args))
    (args.out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    fitted = figures["training"]
    print(
        f"{figures['seconds']:.0f} s in all, {figures['cpu_seconds']:.0f} s of processor time; {fitted['steps']} steps "
        f"of {fitted['seconds_a_step']:.3f} s, ended by {fitted['ended']}"
    )
    for kind, each in figures["new"].items():
        shares = [each[when]["right"] / each[when]["examples"] for when in ("before", "after")]
        print(f"new, {kind:8} {each['after']['examples']:5} {shares[0]:8.3f} -> {shares[1]:.3f}")
    for skill, each in figures["old"].items():
        shares = [each[when][0] / each[when][1] for when in ("before", "after")]
        print(f"old, {skill:9} {each['after'][1]:4} {shares[0]:8.3f} -> {shares[1]:.3f}")


if __name__ == "__main__":
    main()
