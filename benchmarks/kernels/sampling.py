"""Checks the sampling kernel against the reference sampler, then measures every kind of row.

    python -m benchmarks.kernels.sampling [--quick] [--tilings] [--before FOLDER] [--json FILE]

It first checks thousands of random rows, rules and draws. A draw may differ only if the random number equals the
boundary between two ids, up to rounding. Times are medians of captured graphs over bfloat16 logits in the L2 cache,
where the vocabulary head leaves them. Without a GPU, Triton's interpreter checks a few rows and nothing is timed. The
exit status is 1 if a row is wrong.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.reports.report import Report, benchmark_parser
from kestrel_engine.runtime.sampler import sample
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import MAX_TOP, SampleSpec, TokenRule

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kestrel_engine.kernels.sampling.likeliest import likeliest
from kestrel_engine.kernels.sampling.sample import Tiles, allocate, sample_rows
from kestrel_engine.runtime.gpu.sampling.rules import RULE_WIDTH, RuleEncoder

VOCAB = 51200
ROUNDING = 1e-12
"""Of a row's mass: far above what float64 sums differ by, far below what a random number can hit by chance."""
KINDS = ("normal", "peaked", "flat", "rounded", "equal", "outlier")
CALLS = 20
"""In one graph: launches overlap as they do in a decode step."""
SETTINGS = {
    "greedy": SamplingParams(),
    "0.2, top_p 0.9": SamplingParams(temperature=0.2, top_p=0.9),
    "0.7, top_k 50": SamplingParams(temperature=0.7, top_k=50),
    "1.0, top_p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "1.5": SamplingParams(temperature=1.5),
    "1.5, 0.9, 50": SamplingParams(temperature=1.5, top_p=0.9, top_k=50),
}
SHAPES = {"deviation 3": (3.0, 0.0), "deviation 1": (1.0, 0.0), "peaked": (3.0, 15.0)}
"""Logits that are timed: their standard deviation, and what one of them has more."""
TILINGS = [
    Tiles(chunk=512),
    Tiles(chunk=512, list_warps=1),
    Tiles(chunk=2048, list_warps=4),
    Tiles(chunk=2048, warps=2, list_warps=4),
    Tiles(warps=2),
    Tiles(list_warps=1),
    Tiles(list_warps=4),
    Tiles(edges=16),
    Tiles(edges=16, fine=16),
    Tiles(short=256),
    Tiles(short=1024),
    Tiles(draw_warps=4),
]


WAYS = [
    (torch.bfloat16, Tiles(), True),
    (torch.float32, Tiles(short=128, listed=128), False),
    (torch.float16, Tiles(short=16, listed=64), True),
    (torch.bfloat16, Tiles(), False),
]
"""Checked in turn: with less room, stretches are cut again and rows searched whole. Few, for each is compiled."""


class Rows:
    """Logits [M, V] on ``device`` with a spec for each row, and the kernel's outputs."""

    def __init__(
        self,
        logits: Tensor,
        specs: Sequence[SampleSpec],
        tiles: Tiles | None,
        *,
        pdl: bool = False,
        kernels: ModuleType | None = None,
    ) -> None:
        count, device = len(specs), logits.device
        host = {
            "rules": torch.zeros(count, RULE_WIDTH, dtype=torch.int32),
            "temperature": torch.zeros(count, dtype=torch.float64),
            "top_p": torch.zeros(count, dtype=torch.float64),
            "top_k": torch.zeros(count, dtype=torch.int32),
            "noise": torch.zeros(count, dtype=torch.int64),
        }
        odd = RuleEncoder(logits.shape[1]).encode(
            specs, {name: t.numpy() for name, t in host.items()}, count
        )
        assert not odd, odd
        self._columns = [column.to(device) for column in host.values()]
        self._logits, self._tiles, self._pdl = logits, tiles, pdl
        self._greedy = all(spec.sampling.temperature == 0 for spec in specs)
        self._sample_rows = kernels.sample_rows if kernels else sample_rows
        make = kernels.allocate if kernels else allocate
        self._work = make(count, logits.shape[1], device, tiles)
        self.ids = torch.full((count,), -7, dtype=torch.int32, device=device)
        self.logprobs = torch.full((count,), math.nan, device=device)
        self.bad = torch.full((count,), -7, dtype=torch.int32, device=device)
        self._tops = torch.zeros(count, 2, MAX_TOP, dtype=torch.int32, device=device)

    def run(self) -> None:
        self._sample_rows(
            self._logits, *self._columns, greedy=self._greedy, ids=self.ids,
            logprobs=self.logprobs, bad=self.bad, workspace=self._work, tiles=self._tiles,
            pdl=self._pdl,
        )  # fmt: skip

    def find_tops(self) -> None:
        """The likeliest ids, after `run`."""
        likeliest(self._logits, self._columns[0], self._work, self._tops, tiles=self._tiles)


def random_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    logits = 3 * torch.randn(rows, vocab)
    if kind == "peaked":
        logits[torch.arange(rows), torch.randint(vocab, (rows,))] += 15
    elif kind == "flat":
        logits *= 1e-6
    elif kind == "rounded":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros(rows, vocab)
    elif kind == "outlier":
        logits[:, vocab // 2] = 3e4
    return logits.to(dtype)


def random_spec(rng: random.Random, vocab: int) -> SampleSpec:
    allowed = tuple(rng.sample(range(vocab), rng.choice([2, 16]))) if rng.random() < 0.2 else None
    suppressed = tuple(rng.sample(range(vocab), rng.choice([1, 8]))) if rng.random() < 0.4 else ()
    if allowed is not None and not set(allowed) - set(suppressed):
        suppressed = ()
    otherwise = rng.randrange(vocab) if rng.random() < 0.2 else None
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.2, 0.7, 1.0, 1.5, 100.0, 1e-3]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3071153, 0.1, 0.0123711]),
        top_k=rng.choice([0, 0, 0, 1, 3, 50, 10**6]),
        seed=rng.randrange(2**63),
    )
    rule = TokenRule(
        allowed=allowed, suppressed=suppressed, otherwise=otherwise, stop=rng.randrange(vocab)
    )
    return SampleSpec(rule, sampling, rng.randrange(50))


def beside_a_boundary(logits: Tensor, spec: SampleSpec) -> bool:
    """Returns whether the cut of top-p of one row [V] is within ROUNDING of a boundary."""
    row = logits.double().clone()
    if spec.rule.allowed is not None:
        listed = torch.tensor(spec.rule.allowed)
        kept = row[listed]
        row.fill_(-math.inf)
        row[listed] = kept
    row[list(spec.rule.suppressed)] = -math.inf
    ranked = row.sort(descending=True, stable=True).values
    mass = ((ranked - ranked[0]) / spec.sampling.temperature).exp()
    mass[min(spec.sampling.top_k or len(mass), len(mass)) :] = 0
    cumulative = mass.cumsum(0) / mass.sum()
    return spec.sampling.top_p < 1 and bool(
        ((cumulative - spec.sampling.top_p).abs() < ROUNDING).any()
    )


def check(report: Report, device: str, rows: int, vocab: int, batches: int) -> None:
    """Compares ``batches`` batches of each kind with the reference on the CPU; exits if a row is wrong."""
    rng, num_boundary = random.Random(vocab), 0
    torch.manual_seed(vocab)
    for kind in KINDS:
        for batch in range(batches):
            dtype, tiles, early = WAYS[batch % len(WAYS)]
            logits = random_logits(kind, rows, vocab, dtype)
            specs = [random_spec(rng, vocab) for _ in range(rows)]
            ours = Rows(logits.to(device), specs, tiles, pdl=early)
            ours.run()
            once = (ours.ids.clone(), ours.logprobs.clone())
            ours.run()
            if not (torch.equal(once[0], ours.ids) and torch.equal(once[1], ours.logprobs)):
                sys.exit(f"WRONG: {kind} {dtype}: another result the second time")
            wanted = sample(logits.float().clone(), specs)
            found = zip(ours.ids.tolist(), ours.logprobs.tolist(), ours.bad.tolist(), strict=True)
            for i, ((token, logprob, bad), drawn) in enumerate(zip(found, wanted, strict=True)):
                assert drawn is not None, "the logits are finite"
                id_, reference, _ = drawn
                if token != id_ and specs[i].sampling.temperature > 0:
                    if beside_a_boundary(logits[i], specs[i]):
                        num_boundary += 1
                        continue
                close = math.isclose(logprob, reference, rel_tol=3e-5, abs_tol=3e-5)
                if token != id_ or not close or bad:
                    sys.exit(
                        f"WRONG: {kind} {logits.dtype} {specs[i]}: {token} {logprob} bad {bad}, "
                        f"not {id_} {reference}"
                    )
    report.add(
        "checked against the reference sampler",
        {"vocab": vocab, "rows": rows * batches * len(KINDS), "on a boundary": num_boundary},
    )


def microseconds(body: Callable[[], None], replays: int) -> float:
    """Returns the time of one call, from the median replay of a graph of CALLS calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            body()
    times = []
    for i in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1000 / CALLS)
    return float(statistics.median(times))


def kernels_of(folder: Path) -> ModuleType:
    """Imports `kernels.sample` of another checkout's ``kestrel_engine/kernels`` in addition to this one's."""
    name = "kernels_before"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None, folder
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    return importlib.import_module(f"{name}.sample")


def time_rows(report: Report, title: str, shape: str, batches: Sequence[int], **how: Any) -> None:
    """Adds a row of microseconds for each number of rows; ``how``: the other arguments of Rows."""
    deviation, more = SHAPES[shape]
    for rows in batches:
        logits = deviation * torch.randn(rows, VOCAB, device="cuda")
        logits[:, VOCAB // 3] += more
        logits = logits.bfloat16()
        row: dict[str, float | int | str] = {"rows": rows}
        for name, sampling in SETTINGS.items():
            specs = [
                SampleSpec(TokenRule(suppressed=(3,)), SamplingParams(
                    temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=i
                ), 0)
                for i in range(rows)
            ]  # fmt: skip
            row[name] = microseconds(Rows(logits, specs, **how).run, 9)
        report.add(f"microseconds, {shape}, {title}", row)


def time_tops(report: Report, batches: Sequence[int]) -> None:
    """Adds the microseconds that the likeliest ids of all rows add to a greedy pass."""
    for rows in batches:
        logits = (3 * torch.randn(rows, VOCAB, device="cuda")).bfloat16()
        row: dict[str, float | int | str] = {"rows": rows}
        for top in (1, 5, MAX_TOP):
            rule = TokenRule(suppressed=(3,), top=top)
            sampled = Rows(logits, [SampleSpec(rule, SamplingParams(), 0)] * rows, Tiles())
            sampled.run()
            row[f"top {top}"] = microseconds(sampled.find_tops, 9)
        report.add("microseconds, likeliest ids", row)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("kernels.sampling", __doc__)
    parser.add_argument("--tilings", action="store_true", help="also time other tiles")
    parser.add_argument(
        "--before", type=Path, help="also time kestrel_engine/kernels of another checkout"
    )
    flags = parser.parse_args(arguments)
    report = Report("kernels.sampling", {"quick": flags.quick, "vocab": VOCAB})
    if not torch.cuda.is_available():
        check(report, "cpu", rows=2, vocab=100, batches=2)
        report.finish(flags.json)
        return
    check(report, "cuda", rows=64, vocab=1000, batches=4 if flags.quick else 12)
    check(report, "cuda", rows=16, vocab=VOCAB, batches=4)
    batches = (1, 16, 64)
    for shape in SHAPES:
        time_rows(report, "one after the other", shape, batches, tiles=Tiles())
        time_rows(report, "launched early", shape, batches, tiles=Tiles(), pdl=True)
        if flags.before:
            before = kernels_of(flags.before)
            time_rows(report, "before", shape, batches, tiles=None, kernels=before)
    time_tops(report, batches)
    for tiles in TILINGS if flags.tilings else ():
        changed = [f"{n}={v}" for n, v in tiles._asdict().items() if v != getattr(Tiles(), n)]
        for shape in ("deviation 3", "deviation 1"):
            time_rows(report, " ".join(changed), shape, (1, 64), tiles=tiles, pdl=True)
    report.finish(flags.json)


if __name__ == "__main__":
    main()
