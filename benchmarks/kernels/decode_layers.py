"""Moondream 3's layers of a decode step, without head and sampling: plans and tiles against each other.

    python -m benchmarks.kernels.decode_layers [--batches 1 4 16] [--timeline] [--quick]

Random weights at the true shapes, experts in FP8, sequences of 800 positions. Each variant is checked first, against
the plain plan by the stream after the last layer, then captured and replayed: milliseconds of all layers, and
microseconds of one MoE layer. ``--timeline`` prints the kernels of one MoE layer with start and end, by torch's
profiler. Exits with 1 if a variant is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.moe import compile_all
from kestrel_engine.checkpoint.random_weights import random_checkpoint
from kestrel_engine.kernels import moe_decode
from kestrel_engine.kernels.moe_decode import Tile, Tiles
from kestrel_engine.kernels.moe_one import OneTile
from kestrel_engine.model_config import parse_model_config
from kestrel_engine.runtime.gpu.text import FusedText
from kestrel_engine.runtime.gpu.text_decode import DecodePass, DecodePlan
from kestrel_engine.runtime.gpu.weights import pack_weights

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
POSITIONS, PAGE = 800, 10
TOGETHER = DecodePlan(apart=0, inline_tau=0)

PLAIN_UP, PLAIN_DOWN = Tile(8, 512, 4, 3), Tile(16, 512, 4, 2)
ONE_TOKEN: list[Tiles | OneTile] = [
    Tiles(PLAIN_UP, PLAIN_DOWN),
    OneTile(16, 4, 4),
    OneTile(16, 4, 4, 64),
    OneTile(16, 4, 5),
    OneTile(32, 4, 5),
    OneTile(32, 8, 4),
    OneTile(8, 4, 3),
    OneTile(64, 8, 5),
    Tiles(Tile(32, 128, 4, 6, True, True), Tile(64, 128, 4, 6, True, True)),
    Tiles(Tile(32, 256, 4, 5, True, True), Tile(64, 256, 4, 4, True, True)),
    Tiles(Tile(32, 128, 4, 6, False, True), Tile(32, 256, 4, 4, False, True)),
    Tiles(Tile(16, 256, 4, 4, False, True), Tile(64, 128, 4, 6, False, True)),
]


@dataclass(frozen=True)
class Variant:
    name: str
    plan: DecodePlan
    tiles: Tiles | OneTile | None = None
    """Of one token's experts; None: the table's."""
    urgent: bool = False
    """Attention's stream goes before the experts'."""


def variants(batch: int, quick: bool) -> list[Variant]:
    """The first is the one the others must agree with."""
    whole = max(batch, 8)
    found = [
        Variant("together", TOGETHER),
        Variant("together, tau inline", DecodePlan(apart=0, inline_tau=whole)),
        Variant("apart", DecodePlan(apart=whole, inline_tau=0)),
        Variant("apart, tau inline", DecodePlan(apart=whole, inline_tau=whole)),
    ]
    apart = DecodePlan(apart=whole, inline_tau=whole)
    found.append(Variant("apart, tau inline, attention first", apart, urgent=True))
    if batch == 1:
        best = DecodePlan(apart=8, inline_tau=8)
        tiles = ONE_TOKEN[:3] if quick else ONE_TOKEN
        found += [Variant(short(t), best, t) for t in tiles]
        found.append(Variant(f"{short(tiles[1])}, attention first", best, tiles[1], urgent=True))
    return found


def short(tiles: Tiles | OneTile) -> str:
    if isinstance(tiles, OneTile):
        return f"one {tuple(tiles)}"
    return f"{'dot' if tiles.up.dot else 'row'} {tuple(tiles.up[:5])} {tuple(tiles.down[:5])}"


class Stack:
    """The released decoder, a pool, and sequences of ``POSITIONS`` positions."""

    def __init__(self, rows: int) -> None:
        self.config = parse_model_config({}, family="moondream3")
        loaded = random_checkpoint(self.config, 0, DTYPE, DEVICE, keep_fp8=True)
        tensors = pack_weights(self.config, loaded.tensors)
        self.text = FusedText(self.config.text, tensors, max_rows=rows, page_size=PAGE, pdl=True)
        text = self.config.text
        pages_each = POSITIONS // PAGE + 1
        pages = torch.randperm(rows * pages_each, device=DEVICE).to(torch.int32)
        self.table = pages.view(rows, pages_each)
        shape = (text.n_layers, rows * pages_each * PAGE, text.n_heads, text.head_dim)
        self.keys = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
        self.values = torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_()
        self.positions = torch.full((rows,), POSITIONS, dtype=torch.int32, device=DEVICE)
        self.seqs = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.start = torch.randn(rows, text.dim, device=DEVICE).to(DTYPE)

    def body(self, variant: Variant, batch: int) -> Callable[[], Tensor]:
        decode = DecodePass(
            self.config.text,
            self.text._layers,
            self.text._post_ln,
            (self.text._cos, self.text._sin),
            self.text._tau,
            max_rows=batch,
            page_size=PAGE,
            overlap=False,
            pdl=True,
            plan=variant.plan,
        )
        x, normed = torch.empty_like(self.start[:batch]), torch.empty_like(self.start[:batch])

        def run() -> Tensor:
            if variant.tiles is not None:
                moe_decode.TILES[1, 1] = variant.tiles
            x.copy_(self.start[:batch])
            rows = self.positions[:batch], self.seqs[:batch], self.table
            decode(x, *rows, self.keys, self.values, normed=normed)
            return normed

        return run


def captured(body: Callable[[], Tensor], *, urgent: bool) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream(priority=-1 if urgent else 0)
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        body()
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            body()
    torch.cuda.current_stream().wait_stream(side)
    return graph


def median_ms(graph: torch.cuda.CUDAGraph, refresh: Callable[[], object]) -> float:
    """Of a replay among several that follow each other; inputs are drawn anew for each group."""
    times = []
    for _ in range(9):
        refresh()
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 4)
    return statistics.median(times)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def timeline(graph: torch.cuda.CUDAGraph, layers: int) -> None:
    """Kernels of one MoE layer: from one LayerNorm's start to the next one's."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    kernels = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in profiler.profiler.kineto_results.events()
        if e.device_type() == torch.autograd.DeviceType.CUDA
    )
    norms = [start for start, _, name in kernels if name.startswith("_add_layer_norm")]
    for at in (2, layers // 2, layers - 4):
        begin, end = norms[at], norms[at + 1]
        print(f"    layer {at + 1}, {(end - begin) / 1e3:.1f} us:")
        for start, stop, name in kernels:
            if begin <= start <= end:
                a, b = (start - begin) / 1e3, (stop - begin) / 1e3
                print(f"      {a:6.1f} {b:6.1f} {b - a:6.1f}  {name[:60]}")


def measure(stack: Stack, batch: int, quick: bool, with_timeline: bool) -> None:
    def refresh() -> None:
        stack.start.normal_()

    layers = stack.config.text.n_layers
    moe = stack.config.text.moe
    assert moe is not None
    print(f"batch {batch}: ms of {layers} layers, us a layer (mean), error against the first")
    torch.manual_seed(1)
    refresh()
    reference: Tensor | None = None
    best: tuple[float, Variant, torch.cuda.CUDAGraph] | None = None
    first: torch.cuda.CUDAGraph | None = None
    known = moe_decode.TILES[1, 1]
    for variant in variants(batch, quick):
        moe_decode.TILES[1, 1] = known
        torch.manual_seed(2)
        refresh()
        body = stack.body(variant, batch)
        got = body().clone()
        if reference is None:
            reference = got
        off = error(got, reference)
        if not off < 0.15:
            sys.exit(f"WRONG: batch {batch}, {variant.name}: relative error {off:.2e}")
        graph = captured(body, urgent=variant.urgent)
        graph.replay()
        ms = median_ms(graph, refresh)
        print(f"  {ms:7.4f} {1e3 * ms / layers:6.1f}  {off:.1e}  {variant.name}", flush=True)
        if best is None or ms < best[0]:
            best = ms, variant, graph
        first = first or graph
    moe_decode.TILES[1, 1] = known
    assert best is not None and first is not None
    if with_timeline:
        print("  the first:")
        timeline(first, layers)
        print(f"  the best, {best[1].name}:")
        timeline(best[2], layers)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--timeline", action="store_true", help="kernels of a layer in time")
    parser.add_argument("--quick", action="store_true", help="fewer tiles")
    args = parser.parse_args()
    began = time.monotonic()
    if 1 in args.batches:
        tiles = ONE_TOKEN[:3] if args.quick else ONE_TOKEN
        compile_all([("decode", 1, 1, t, True) for t in tiles])
        print(f"tiles compiled after {time.monotonic() - began:.0f} s", flush=True)
    stack = Stack(max(args.batches))
    torch.cuda.synchronize()
    print(f"weights made after {time.monotonic() - began:.0f} s", flush=True)
    for batch in args.batches:
        measure(stack, batch, args.quick, args.timeline and batch in (1, 4))
        print(f"  after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
