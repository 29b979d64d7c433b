"""Greedy answers of the engine, scored by kind of request; the figures after a slice.

python -m training.judging training/resume OUT --each 24      # figures.json and answers.txt; 30 minutes on two cores
"""

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kestrel_client.commands.evaluation import answers
from kestrel_client.commands.evaluation.records import Record
from kestrel_client.commands.evaluation.sets.drawn import read_truth
from kestrel_engine import InCrops, InferenceEngine, RuntimeConfig
from training.domains.picture import Ask, Picture
from training.held_out import ASKS, BARS, held_out, held_out_more, request_of
from training.kestrel_small import export
from training.learning import checkpoints
from training.mixture import DOMAINS
from training.prompts import opening, write
from training.scenes.captions import named_objects

ROOM = 120  # tokens of an answer
AT_ONCE = 128
NAMED = ("caption", "shapes caption short", "shapes caption normal")
Output = Mapping[str, Any]


async def answer(
    engine: InferenceEngine, image: Any, ask: Ask, size: tuple[int, int], room: int | None = None
) -> Output:
    """The engine's output for a request about an image of this width and height, in at most ``room`` tokens."""
    settings: dict[str, Any] = {"temperature": 0.0, "max_tokens": room}
    if ask.skill in ("query", "reasoning"):
        refs = [[v / size[i % 2] for i, v in enumerate(ref)] for ref in ask.refs] or None
        thinks = ask.skill == "reasoning"
        result = await engine.query(
            image, ask.text, reasoning=thinks, spatial_refs=refs, settings=settings
        )
    else:
        result = await getattr(engine, ask.skill)(image, ask.text, settings=settings)
    return result.output


def text_of(output: Output) -> str:
    return str(output.get("answer", output.get("caption", "")))


def score(ask: Ask, output: Output, width: int, height: int) -> tuple[float, float]:
    """(won, possible), as ``kestrel eval`` scores. Their sums over a kind give its figure."""
    if ask.kind in NAMED:  # the order and the grouping of the shapes are free
        return float(named_objects(text_of(output)) == named_objects(ask.answer)), 1
    request = Record(ask.kind, 1, request_of(ask, width, height), "", str)
    # The engine returns a segment without a box where it finds nothing.
    segments = [segment for segment in output.get("segments", ()) if segment.get("bbox")]
    found = {"answer": text_of(output), **output, "segments": segments}
    scored = answers.score(read_truth(request), found)
    return next(iter(scored.counts.values()))


def is_right(ask: Ask, share: float) -> bool:
    """Whether a reply with this share of what was possible is right as a whole."""
    return share >= (0.5 if ask.skill == "segment" else 0.9999)


class Judged(NamedTuple):
    """A reply with its share of what was possible."""

    group: str
    picture: Picture
    ask: Ask
    output: Output
    won: float
    possible: float

    @property
    def share(self) -> float:
        return self.won / self.possible if self.possible else 1.0


async def judge(
    config: RuntimeConfig,
    examples: Sequence[tuple[str, Picture]],
    brief: bool = False,
    max_crops: int = 0,
) -> list[Judged]:
    """The replies to all requests. max_crops: the budget of each picture; 0: none. brief: to ASKS a picture, and no
    reply is much longer than the truth."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(group: str, picture: Picture, ask: Ask) -> Judged:
        height, width = picture.pixels.shape[:2]
        size, room = (width, height), None
        if brief:
            room = min(len(write(ask, *size).ids) - len(opening(ask, *size).ids) + 12, ROOM)
        async with turns:
            image = InCrops(picture.pixels, max_crops) if max_crops else picture.pixels
            output = await answer(engine, image, ask, size, room)
        return Judged(group, picture, ask, output, *score(ask, output, *size))

    async with await InferenceEngine.create(config) as engine:
        most = ASKS if brief else None
        every = ((g, picture, ask) for g, picture in examples for ask in picture.asks[:most])
        return list(await asyncio.gather(*(one(*each) for each in every)))


def engine_config(folder: Path, device: str) -> RuntimeConfig:
    """Plain torch computes: on a GPU, compiling the kernels would take longer than the figures."""
    return RuntimeConfig(
        model_path=folder, device=device, compile=False, max_batch_size=64, kv_cache_gib=2,
        calibration="off",
    )  # fmt: skip


def figures_of(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """{kind: {score, exact, n, bar}}"""
    by_kind: dict[str, list[tuple[float, float, Judged]]] = defaultdict(list)
    for one in judged:
        by_kind[one.ask.kind].append((one.won, one.possible, one))
        by_kind[f"{one.group}: all"].append((one.share, 1, one))
    return {
        kind: {
            "score": round(sum(won for won, _, _ in rows) / max(sum(p for _, p, _ in rows), 1e-9), 4),
            "exact": round(sum(is_right(j.ask, j.share) for _, _, j in rows) / len(rows), 4),
            "n": len(rows),
            "bar": BARS.get(kind),
        }
        for kind, rows in sorted(by_kind.items())
    }  # fmt: skip


def table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'kind':28} {'score':>7} {'exact':>7} {'n':>5} {'bar':>6}"]
    for kind, f in figures.items():
        bar = "" if f["bar"] is None else f"{100 * f['bar']:.0f}"
        lines.append(
            f"{kind:28} {100 * f['score']:7.1f} {100 * f['exact']:7.1f} {f['n']:5} {bar:>6}"
        )
    return "\n".join(lines)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("model", type=Path, help="checkpoint pieces, or a model that the engine loads")
    p.add_argument("out", type=Path, help="folder for figures.json and answers.txt")
    p.add_argument("--each", type=int, default=20, help="pictures of a domain")
    p.add_argument("--domains", nargs="+", default=list(DOMAINS))
    p.add_argument("--device", default="cpu")
    given = p.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as made:
        folder: Path = given.model
        if not (folder / "config.json").exists():
            folder = Path(made)
            export(checkpoints.load_quantised(given.model)["model"], folder)
        config = engine_config(folder, given.device)
        examples = held_out(given.each, given.domains)
        examples += held_out_more(examples)
        judged = asyncio.run(judge(config, examples, brief=True))
    figures = figures_of(judged)
    print(table(figures), flush=True)
    (given.out / "figures.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    said = (
        f"{j.ask.kind} {j.share:.2f} {j.ask.text!r}: {j.ask.answer!r}, said {text_of(j.output)!r}"
        for j in judged
    )
    (given.out / "answers.txt").write_text("\n".join(said), encoding="utf-8")


if __name__ == "__main__":
    main()
