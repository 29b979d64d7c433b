"""Teach kestrel-tiny a shape or a colour that it does not know, and measure what it learnt and what it kept.

    python -m training.teach_shape --out out/hexagons
    python -m training.teach_shape --colour lavender --out out/lavender

Draws 200 images with and without the new objects, fits an adapter with ``kestrel_engine.teaching`` as ``kestrel-grpc
train`` does, and measures it on 100 held-out images. What the base model scores on as many images of a near thing that
it knows says how hard such images are. The old skills are measured on scenes of the frozen evaluation set, without and
with the adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from kestrel_engine import InferenceEngine, RuntimeConfig, teaching
from training import new_objects


async def measure(
    config: RuntimeConfig, held_out: Path, adapter: str | None, old_scenes: int
) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The scores on the held-out images, and for each old skill the right answers and all."""
    from kestrel_engine.teaching.judging import judge
    from kestrel_grpc.scenes.evaluation_set import encode, example
    from kestrel_grpc.scenes.scoring import score

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


async def judged(config: RuntimeConfig, folder: Path) -> dict[str, Any]:
    """The base model's scores on the images of a folder."""
    from kestrel_engine.teaching.judging import judge

    async with await InferenceEngine.create(config) as engine:
        scores = await judge(engine, teaching.read_folder(folder))
    return {kind: each.as_dict() for kind, each in scores.items()}


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
    subject = new_objects.hexagons() if args.colour is None else new_objects.coloured(args.colour)
    adapter = args.colour or subject.name
    new_objects.write(
        out / "training", subject, "training", args.images, True, more=args.more_contrast
    )
    new_objects.write(out / "held_out", subject, "held_out", args.held_out)
    new_objects.write(out / "known", new_objects.known(args.colour), "held_out", args.held_out)
    config = RuntimeConfig(device=args.device, cpu_threads=args.threads, adapters_dir=adapters)
    settings = teaching.TeachingSettings(
        epochs=args.epochs,
        minutes=args.minutes,
        rank=args.rank,
        layers=args.layers,
        learning_rate=args.lr,
        replay=args.replay,
        rows=args.rows,
        seed=args.seed,
        leave_out=args.leave_out,
        vary=args.vary,
        mirror=args.mirror,
        validation=args.validation,
    )
    images = teaching.read_folder(out / "training")
    began, spent = time.monotonic(), time.process_time()
    report = await teaching.teach(
        config,
        adapter,
        images,
        settings,
        overwrite=True,
        progress=_print_progress,
        on_step=_print_step,
    )
    seconds, cpu = time.monotonic() - began, time.process_time() - spent
    new, old = await measure(config, out / "held_out", None, args.old)
    new_after, old_after = await measure(config, out / "held_out", adapter, args.old)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "training": report.as_dict()["training"],
        "new": {kind: {"before": new[kind], "after": new_after[kind]} for kind in new},
        "known": await judged(config, out / "known"),
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
    p.add_argument("--out", type=Path, default=Path("out/taught"), help="folder to write to")
    p.add_argument(
        "--colour", choices=new_objects.NEW_COLOURS, help="the colour to teach instead of hexagons"
    )
    p.add_argument("--images", type=int, default=200, help="images to train on")
    p.add_argument("--held-out", type=int, default=100, help="images to measure on")
    p.add_argument("--more-contrast", action="store_true", help="ask more about each image")
    p.add_argument("--old", type=int, default=100, help="scenes to measure the old skills on")
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--minutes", type=float, default=2.0, help="most minutes of training")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--layers", default=teaching.TeachingSettings().layers, choices=teaching.LAYERS)
    p.add_argument("--lr", type=float, default=0.001)
    p.add_argument("--replay", type=float, default=teaching.TeachingSettings().replay)
    p.add_argument("--rows", type=int, default=4)
    p.add_argument("--leave-out", type=float, default=0.0)
    p.add_argument("--vary", type=float, default=0.12, help="0: images as they are")
    p.add_argument("--mirror", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--validation", type=float, default=0.05, help="share of the images held out")
    p.add_argument("--seed", type=int, default=0)
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
        known = figures["known"][kind]["right"] / figures["known"][kind]["examples"]
        print(
            f"new, {kind:8} {each['after']['examples']:5} {shares[0]:8.3f} -> {shares[1]:.3f} "
            f"(what it knows: {known:.3f})"
        )
    for skill, each in figures["old"].items():
        shares = [each[when][0] / each[when][1] for when in ("before", "after")]
        print(f"old, {skill:9} {each['after'][1]:4} {shares[0]:8.3f} -> {shares[1]:.3f}")


if __name__ == "__main__":
    main()
