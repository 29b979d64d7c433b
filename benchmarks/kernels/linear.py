"""Measures the decode GEMMs on a GPU: candidates against float32, cuBLAS and the memory's rate, alone and in a chain.

    python -m benchmarks.kernels.linear [--quick] [--json PATH]

Microseconds are medians of captured CUDA graphs that rotate over weights which exceed the L2 cache. A chain is 24
layers of add_layer_norm, qkv|fc1, a substitute for attention, and proj|fc2 as partial sums; only a chain shows the cost
of launches and of their tails. The substitute can take as long as attention with one row, during which weights can be
prefetched. The exit status is 1 if a candidate's result differs from torch's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kestrel_engine.kernels.layer_norm import add_layer_norm
from kestrel_engine.kernels.linear.skinny_linear import skinny_linear, skinny_partials
from kestrel_engine.kernels.linear.skinny_tiling import Tiling

COPY_RATE = 4.28  # TB/s, an H200's device-to-device copy
ROTATION_BYTES = 400e6
LAYERS = 24
DIM, WIDE = 2048, 14336
OF_MLP = DIM + 4 * DIM
DTYPE = torch.bfloat16
# A candidate that this GPU or this Triton does not take is left out; a wrong one ends the run.
REFUSALS = (triton.TritonError, RuntimeError)


@dataclass(frozen=True)
class Case:
    """One weight's shape. ``gelu_from``: as `skinny_linear` has it. ``splits``: those tried; empty: not split."""

    name: str
    n: int
    k: int
    gelu_from: int | None = None
    splits: tuple[int, ...] = ()

    @property
    def megabytes(self) -> float:
        return self.n * self.k * 2 / 1e6


@dataclass(frozen=True)
class Candidate:
    """A tiling, and into how many parts K is split (None: `skinny_linear`)."""

    tiling: Tiling
    splits: int | None

    def __str__(self) -> str:
        t = self.tiling
        kind = "row" if t.one_row else "dot"
        split = f" S{self.splits}" if self.splits else ""
        stages = "" if t.one_row else f" s{t.stages}"
        stages += " tma" if t.boxes else ""
        return f"{kind} {t.block_n}x{t.block_k}{stages} w{t.warps}{split}"


CASES = [
    Case("qkv|fc1", WIDE, DIM, gelu_from=3 * DIM),
    Case("proj|fc2", DIM, OF_MLP, splits=(4, 8, 10)),
    Case("qkv", 3 * DIM, DIM),
    Case("proj", DIM, DIM, splits=(4, 8)),
    Case("lm_head", 51200, DIM),
]
DOT = [
    Tiling(64, 128, stages=4, warps=4),
    Tiling(64, 128, stages=6, warps=4),
    Tiling(64, 256, stages=3, warps=4),
    Tiling(64, 128, stages=4, warps=4, boxes=True),
    Tiling(64, 256, stages=3, warps=4, boxes=True),
    Tiling(128, 64, stages=6, warps=4),
    Tiling(128, 128, stages=4, warps=8, boxes=True),
]
# Below 64 rows of weight there is no wide instruction, but there are more programs.
NARROW = [Tiling(32, 128, stages=6, warps=4), Tiling(16, 256, stages=5, warps=4)]
ONE_ROW = [
    Tiling(8, 2048, warps=8, one_row=True),
    Tiling(4, 2048, warps=8, one_row=True),
    Tiling(8, 1024, warps=4, one_row=True),
    Tiling(16, 1024, warps=8, one_row=True),
]


def candidates(case: Case, rows: int, quick: bool) -> list[Candidate]:
    """Returns tilings that divide the parts of K. Others leave programs idle."""
    tilings = DOT[:4] if quick else DOT + (NARROW if rows <= 16 else [])
    if rows == 1:
        tilings = tilings + (ONE_ROW[:2] if quick else ONE_ROW)
    splits: tuple[int | None, ...] = case.splits or (None,)
    if rows == 1 and case.k == OF_MLP:
        splits = (*splits, 5)
    return [
        Candidate(t, s)
        for t in tilings
        for s in splits
        if case.k % (s or 1) == 0 and (case.k // (s or 1)) % t.block_k == 0
    ]


def compute(case: Case, c: Candidate, x: Tensor, w: Tensor, bias: Tensor, pdl: bool) -> Tensor:
    if c.splits:
        return skinny_partials(x, w, splits=c.splits, pdl=pdl, tiling=c.tiling)
    return skinny_linear(x, w, bias, gelu_from=case.gelu_from, pdl=pdl, tiling=c.tiling)


def compile_some(jobs: list[tuple[Case, Candidate, int, bool]]) -> None:
    """Fills Triton's cache on disk, in a separate process. The run reports kernels that do not fit."""
    for case, candidate, rows, pdl in jobs:
        x = torch.empty(rows, case.k, dtype=DTYPE, device="cuda")
        w = torch.empty(case.n, case.k, dtype=DTYPE, device="cuda")
        bias = torch.empty(case.n, dtype=DTYPE, device="cuda")
        with contextlib.suppress(*REFUSALS):
            compute(case, candidate, x, w, bias, pdl)


def compile_all(jobs: list[tuple[Case, Candidate, int, bool]]) -> None:
    """One job for each thing that is compiled: the shape counts as divisible by tiles and by 16, as all of ours are."""
    distinct: dict[Any, tuple[Case, Candidate, int, bool]] = {}
    for case, c, rows, pdl in jobs:
        single = c.tiling.one_row and case.k // (c.splits or 1) == c.tiling.block_k
        block_m = max(16, triton.next_power_of_2(rows))
        key = (c.tiling, c.splits is None, case.gelu_from is None, single, block_m, pdl)
        distinct.setdefault(key, (case, c, rows, pdl))
    todo = list(distinct.values())
    workers = min(12, multiprocessing.cpu_count())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_some, [todo[i::workers] for i in range(workers)], chunksize=1)
    print(f"{len(todo)} compilations", flush=True)


def graph_of(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Captures ``body`` after running it once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def microseconds(body: Callable[[], object], units: int, replays: int = 9) -> float:
    """Returns the median replay time of a graph of ``body``, divided by its ``units`` of work."""
    graph = graph_of(body)
    times = []
    for i in range(replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1000 / units)
    return float(statistics.median(times))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


def check(case: Case, c: Candidate, x: Tensor, w: Tensor, bias: Tensor, wanted: Tensor) -> None:
    """``wanted`` [M, N] float32: without bias if split. Exits if wrong."""
    for pdl in (False, True):
        got = compute(case, c, x, w, bias, pdl)
        error = relative_error(got.sum(0) if c.splits else got, wanted)
        bound = 1e-5 if c.splits else 4e-3
        if not error < bound:
            sys.exit(f"WRONG: {case.name} M={len(x)} {c} pdl={pdl}: relative error {error:.2e}")


def same_bits(case: Case) -> bool:
    """Returns whether a row's result is the same in every batch, for every tile of tensor cores and one split of K."""
    w = torch.randn(case.n, case.k, dtype=DTYPE, device="cuda")
    x = torch.randn(64, case.k, dtype=DTYPE, device="cuda")
    bias = torch.randn(case.n, dtype=DTYPE, device="cuda")
    splits = case.splits[0] if case.splits else None
    rows = [
        compute(case, Candidate(t, splits), x[:m], w, bias, False)[..., :1, :]
        for m in (1, 16, 32, 64)
        for t in (DOT[0], DOT[2])
    ]
    return all(torch.equal(row, rows[0]) for row in rows)


def run_case(case: Case, rows: int, tried: list[Candidate]) -> list[dict[str, Any]]:
    """Times cuBLAS and every candidate, without and with programmatic launch, the fastest first."""
    copies = max(int(ROTATION_BYTES / (case.megabytes * 1e6)), 2)
    weights = [torch.randn(case.n, case.k, dtype=DTYPE, device="cuda") for _ in range(copies)]
    x = torch.randn(rows, case.k, dtype=DTYPE, device="cuda")
    bias = torch.randn(case.n, dtype=DTYPE, device="cuda")
    wanted = F.linear(x.float(), weights[0].float(), None if case.splits else bias.float())
    if case.gelu_from is not None:
        wanted[:, case.gelu_from :] = F.gelu(wanted[:, case.gelu_from :], approximate="tanh")
    turns = weights * max(1, 24 // copies)

    def row(what: str, us: float, pdl: bool, c: Candidate | None) -> dict[str, Any]:
        rate = round(case.megabytes / us, 2)
        found = {"case": case.name, "rows": rows, "what": what, "pdl": pdl, "us": round(us, 2)}
        return {**found, "TB/s": rate, "candidate": c}

    def cublas() -> None:
        for w in turns:
            F.linear(x, w, None if case.splits else bias)

    found = [row("cuBLAS", microseconds(cublas, len(turns)), False, None)]
    for c in tried:
        try:
            check(case, c, x, weights[0], bias, wanted)
        except REFUSALS as error:
            print(f"refused: {case.name} M={rows} {c}: {str(error)[:100]}")
            continue
        for pdl in (False, True):
            best = replace(c, tiling=replace(c.tiling, prefetch=4)) if pdl else c

            def ours(c: Candidate = best, pdl: bool = pdl) -> None:
                for w in turns:
                    compute(case, c, x, w, bias, pdl)

            found.append(row(str(c), microseconds(ours, len(turns)), pdl, c))
    return found


@triton.jit
def _stand_in_kernel(
    buffer, stride, cycles, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """v = q + k + v of one block of columns of one row, after at least ``cycles`` of waiting."""
    at = buffer + tl.program_id(0) * stride + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    read: tl.constexpr = "mov.u64 $0, %clock64;"
    begin = tl.inline_asm_elementwise(read, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < cycles:
        now = tl.inline_asm_elementwise(read, "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    q, k, v = (tl.load(at), tl.load(at + DIM), tl.load(at + 2 * DIM))
    tl.store(at + 2 * DIM, ((q.to(tl.float32) + k + v) * 0.5).to(v.dtype))


class Chain:
    """24 layers' weights and the decode buffers for ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=DTYPE, device="cuda")

        self.rows = rows
        self.wide = [random(WIDE, DIM).mul_(0.02) for _ in range(LAYERS)]
        self.deep = [random(DIM, OF_MLP).mul_(0.01) for _ in range(LAYERS)]
        self.bias, self.owed = random(WIDE), torch.randn(DIM, device="cuda")
        self.weight, self.ln_bias = random(DIM), random(DIM)
        self.start = random(rows, DIM)
        self.resize(rows)

    def resize(self, rows: int) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device="cuda")

        self.rows, self.start = rows, torch.randn(rows, DIM, dtype=DTYPE, device="cuda")
        self.x, self.u, self.buffer = empty(rows, DIM), empty(rows, DIM), empty(rows, WIDE)

    def run(
        self, wide: Candidate | None, deep: Candidate | None, pdl: bool, spin_us: float
    ) -> Tensor:
        """Returns the residual stream at the end. None: with cuBLAS's GEMMs, without their GELU."""
        self.x.copy_(self.start)
        splits = (deep.splits if deep else 1) or 1
        partials = torch.zeros(splits, self.rows, DIM, device="cuda")
        part: Tensor = partials
        # Attention's output takes v's place, beside fc1's: one matrix for proj|fc2.
        buffer = self.buffer
        inner = buffer[:, 2 * DIM :]
        launch = {"launch_pdl": True} if pdl else {}
        for w1, w2 in zip(self.wide, self.deep, strict=True):
            add_layer_norm(
                self.x, [part], self.owed, self.weight, self.ln_bias, pdl=pdl, out=self.u
            )
            if wide:
                skinny_linear(
                    self.u, w1, self.bias, gelu_from=3 * DIM, pdl=pdl, tiling=wide.tiling, out=self.buffer
                )  # fmt: skip
            else:
                buffer = F.linear(self.u, w1, self.bias)
                inner = buffer[:, 2 * DIM :]
            _stand_in_kernel[(self.rows, 8)](
                buffer, WIDE, int(spin_us * 1900), DIM=DIM, BLOCK=DIM // 8, PDL=pdl,
                **launch,
            )  # fmt: skip
            if deep:
                part = skinny_partials(inner, w2, pdl=pdl, tiling=deep.tiling, out=partials)
            else:
                part = F.linear(inner, w2)
        return self.x


def run_chain(
    chain: Chain, wides: list[Candidate], deeps: list[Candidate], depths: list[int], spin_us: float
) -> list[dict[str, Any]]:
    """Times cuBLAS, our kernels without and with programmatic launch, then the best value of each parameter."""
    found = []

    def measure(what: str, wide: Candidate | None, deep: Candidate | None, pdl: bool) -> float:
        us = microseconds(lambda: chain.run(wide, deep, pdl, spin_us), LAYERS)
        found.append({
            "rows": chain.rows, "spin": spin_us, "what": what, "pdl": pdl, "us a layer": round(us, 2),
            "wide": wide, "deep": deep,
        })  # fmt: skip
        return us

    def with_prefetch(c: Candidate, depth: int) -> Candidate:
        return replace(c, tiling=replace(c.tiling, prefetch=depth))

    def name(c: Candidate) -> str:
        return f"{c} p{c.tiling.prefetch}"

    measure("cuBLAS", None, None, False)
    plain = chain.run(wides[0], deeps[0], False, spin_us).clone()
    measure(f"{wides[0]} / {deeps[0]}", wides[0], deeps[0], False)
    trials: dict[tuple[Candidate, Candidate], float] = {}

    def trial(wide: Candidate, deep: Candidate) -> float:
        if (wide, deep) not in trials:
            trials[wide, deep] = measure(f"{name(wide)} / {name(deep)}", wide, deep, True)
        return trials[wide, deep]

    wide, deep = wides[0], deeps[0]
    for depth in (0, 8):
        pair = with_prefetch(wide, depth), with_prefetch(deep, depth)
        graph = graph_of(partial(chain.run, *pair, True, spin_us))
        for _ in range(5):
            graph.replay()
            if not torch.equal(chain.x, plain):
                sys.exit(f"WRONG: the chain of {chain.rows} rows differs under programmatic launch")
    options = [
        with_prefetch(c, d) for c in wides for d in (depths if not c.tiling.one_row else [0])
    ]
    wide = min(options, key=lambda c: trial(c, deep))
    options = [
        with_prefetch(c, d) for c in deeps for d in (depths if not c.tiling.one_row else [0])
    ]
    deep = min(options, key=lambda c: trial(wide, c))
    return found


def show(rows: list[dict[str, Any]], hidden: set[str], title: str) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  ".join(f"{v!s:>9}" for name, v in row.items() if name not in hidden))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer row counts and candidates")
    parser.add_argument("--json", help="write every figure to this path")
    args = parser.parse_args()
    began = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    counts = [1, 16, 64] if args.quick else [1, 4, 16, 32, 64]
    tried = {(c.name, m): candidates(c, m, args.quick) for c in CASES for m in counts}
    jobs = [
        (c, o, m, p) for c in CASES for m in counts for o in tried[c.name, m] for p in (False, True)
    ]
    compile_all(jobs)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    alone: list[dict[str, Any]] = []
    best: dict[tuple[str, int], list[Candidate]] = {}
    ranked: list[Any]
    print(
        f"\n{'case':>9} {'M':>3}  {'cuBLAS':>7}  {'plain':>7} {'TB/s':>5}  {'pdl':>7} {'TB/s':>5}"
    )
    for case in CASES:
        for m in counts:
            found = run_case(case, m, tried[case.name, m])
            alone += found
            cublas, *ours = found
            plain = min((r for r in ours if not r["pdl"]), key=lambda r: r["us"])
            ranked = sorted((r for r in ours if r["pdl"]), key=lambda r: r["us"])
            best[case.name, m] = [r["candidate"] for r in ranked]
            top = ranked[0]
            print(
                f"{case.name:>9} {m:>3}  {cublas['us']:7.2f}  {plain['us']:7.2f} {plain['TB/s']:5.2f}"
                f"  {top['us']:7.2f} {top['TB/s']:5.2f}  plain: {plain['what']};  pdl: "
                + ", ".join(f"{r['what']} {r['us']}" for r in ranked[:3]),
                flush=True,
            )
    print("the same bits whatever M and tile:", {c.name: same_bits(c) for c in CASES[:2]})
    print(f"alone after {time.monotonic() - began:.0f} s", flush=True)
    chained: list[dict[str, Any]] = []
    chain = Chain(1)
    for m in (1, 16, 64):
        chain.resize(m)
        for spin_us in (0.0, 8.0):
            wides, deeps = best["qkv|fc1", m][:3], best["proj|fc2", m][:4]
            found = run_chain(chain, wides, deeps, [0, 4, 8, 16], spin_us)
            chained += found
            first, ranked = found[:2], sorted(found[2:], key=lambda r: r["us a layer"])
            hidden = {"wide", "deep", "rows", "spin"}
            title = f"chain, {m} rows, attention stands in for {spin_us} us: microseconds a layer"
            show(first + ranked[: 3 if args.quick else 6] + ranked[-1:], hidden, title)
    floor = (WIDE * DIM + DIM * OF_MLP) * 2 / 1e6 / COPY_RATE
    print("\nbest alone, for _config (prefetch is the chain's to choose):")
    for (name, m), ranked in best.items():
        print(f"{name:>9} {m:>3}  splits={ranked[0].splits}  {ranked[0].tiling}")
    print(f"\nfloor of a chain's layer {floor:.1f} us; all after {time.monotonic() - began:.0f} s")
    if args.json:
        figures = {"alone": alone, "chained": chained}
        Path(args.json).write_text(json.dumps(figures, default=asdict, indent=1))


if __name__ == "__main__":
    main()
