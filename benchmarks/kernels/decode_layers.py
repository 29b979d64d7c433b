"""Measures the layers of a decode step, without head and sampling: the served variant and single changes.

    python -m benchmarks.kernels.decode_layers [--model moondream2] [--fp8] [--batches 1 4 16] [--timeline] [--quick]

It uses random weights of the true shapes, Moondream 3's experts in FP8, and sequences of 800 positions. Each variant is
first checked: its residual stream after the last layer is compared with that of the kernels for more than 64 rows,
which run on one stream. Then it is captured and replayed, and the time of all layers and of one layer is reported. The
best value of each axis (attention's tiles, experts' tiles and so on) is used for the next axis. ``--timeline`` prints
the start and end of the kernels of three layers, by torch's profiler. The exit status is 1 if a variant is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint
from kestrel_engine.kernels.attention import paged_decode
from kestrel_engine.kernels.attention.paged_decode import DecodeConfig
from kestrel_engine.kernels.linear import skinny_linear, skinny_tiling
from kestrel_engine.kernels.linear.skinny_tiling import Tiling, default_splits
from kestrel_engine.kernels.moe import decode as moe_decode
from kestrel_engine.kernels.moe.decode import Tile, Tiles
from kestrel_engine.runtime.gpu.attention import decode as decode_attention
from kestrel_engine.runtime.gpu.capture import first_fork
from kestrel_engine.runtime.gpu.text import decode_step as text_decode
from kestrel_engine.runtime.gpu.text.decode_step import AHEAD_ROWS, DecodePass
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.model_config import parse_model_config

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
POSITIONS, PAGE = 800, 10

D = DecodeConfig
# By class of batch (`moe_decode.batch_class`): what comes within a tenth of the served tiles on an H200.
EXPERT_TILES: dict[int, list[Tiles]] = {
    1: [Tiles(Tile(8, 512, 4, 3), Tile(16, 512, 4, 2))],
    16: [
        Tiles(Tile(32, 128, 4, 6, False), Tile(64, 128, 4, 4)),
        Tiles(Tile(32, 128, 4, 4, False), Tile(64, 128, 4, 4, False)),
        Tiles(Tile(32, 128, 4, 4, False), Tile(64, 128, 4, 6)),
    ],
    64: [],
}
FEW_ROWS = [D(4, 64, 4), D(4, 64, 4, merge=16), D(4, 32, 4, ahead=True, merge=16)]
SOME_ROWS = [D(16, 8, 4, 3, merge=16)]


@dataclass(frozen=True)
class Variant:
    """A field of None: as the server has it.

    ``ahead``: experts begin beside the LayerNorm. ``early``: attention begins before the GEMM in front of it has ended.
    ``prefetch``: the tiles that a program of a block's first GEMM and of its output GEMM prefetches. ``first``,
    ``output``: the tilings of these GEMMs. ``parts``: the output GEMM has as many parts of K for weights in FP8 as for
    others.
    """

    attention: DecodeConfig | None = None
    tiles: Tiles | None = None
    ahead: bool | None = None
    early: bool | None = None
    prefetch: tuple[int, int] | None = None
    first: Tiling | None = None
    output: Tiling | None = None
    parts: bool | None = None
    reference: bool = False

    def __str__(self) -> str:
        if self.reference:
            return "as of more than 64 rows"
        said = []
        if (a := self.attention) is not None:
            ahead = " ahead" if a.ahead else ""
            said.append(
                f"attention {a.heads}x{a.block} w{a.num_warps} s{a.stages} m{a.merge}{ahead}"
            )
        if (t := self.tiles) is not None:
            said.append(f"up {tuple(t.up)} down {tuple(t.down)}")
        said += [] if self.ahead is None else ["experts ahead" if self.ahead else "experts behind"]
        said += (
            [] if self.early is None else ["attention early" if self.early else "attention late"]
        )
        said += [] if self.prefetch is None else [f"prefetch {self.prefetch}"]
        for name, tiling in (("first", self.first), ("output", self.output)):
            said += [] if tiling is None else [f"{name} {tiling}"]
        said += ["parts as in bfloat16"] if self.parts else []
        return ", ".join(said) or "served"

    @contextmanager
    def applied(self, batch: int) -> Iterator[None]:
        """Applies the variant while a pass is made, run and captured."""
        with ExitStack() as stack:

            def patch(owner: object, name: str, value: object) -> None:
                stack.enter_context(mock.patch.object(owner, name, value))

            if self.reference:
                patch(text_decode, "MAX_TOKENS", 0)
                patch(text_decode, "INLINE_TAU_ROWS", 0)
                patch(text_decode, "MAX_ROWS", 0)
            if self.ahead is not None:
                patch(text_decode, "AHEAD_ROWS", range(batch, batch + int(self.ahead)))
            if self.attention is not None:
                chosen = self.attention
                patch(paged_decode, "_config", lambda *_, **__: chosen)
            if self.tiles is not None:
                table = moe_decode.TILES | {(1, moe_decode.batch_class(batch)): self.tiles}
                patch(moe_decode, "TILES", table)
            if self.parts:
                patch(text_decode, "splits_of", lambda weight: default_splits(*weight.shape))
            if self.early is not None:
                patch(decode_attention, "EARLY_ROWS", batch if self.early else 0)
            if self.prefetch or self.first or self.output:
                served = skinny_tiling.tiling_of

                def tiling(rows: int, n: int, k: int, splits: int, size: int) -> Tiling:
                    own = self.first if splits == 1 else self.output
                    chosen = own or served(rows, n, k, splits, size)
                    if self.prefetch is None:
                        return chosen
                    return replace(chosen, prefetch=self.prefetch[0 if splits == 1 else 1])

                for module in (skinny_linear, skinny_tiling):
                    patch(module, "tiling_of", tiling)
            yield


DENSE: list[list[dict[str, Any]]] = [
    [{"attention": D(4, 64, 4, ahead=True, merge=16)}, {"attention": D(4, 64, 4, merge=16)}],
    [{"prefetch": (0, 4)}, {"prefetch": (4, 0)}, {"prefetch": (8, 0)}],
]
T = Tiling
IN_FP8: list[list[dict[str, Any]]] = [
    [{"attention": D(4, 64, 4, merge=16)}, {"early": False}],
    [
        {"first": T(128, 128, stages=4, warps=8, boxes=True)},
        {"first": T(64, 256, stages=3, boxes=True)},
        {"first": T(64, 128, stages=4, boxes=True)},
        {"first": T(64, 128, stages=6, boxes=True)},
    ],
    [
        {"output": T(64, 128, stages=4, boxes=True)},
        {"output": T(64, 128, stages=6, boxes=True)},
        {"output": T(64, 256, stages=3, boxes=True)},
    ],
]
EXPERTS_IN_FP8: list[list[dict[str, Any]]] = [
    [{"parts": True}],
    [
        {"first": T(64, 128, stages=4, boxes=True)},
        {"first": T(32, 256, stages=4, boxes=True)},
        {"first": T(64, 128, stages=6, boxes=True)},
    ],
    [
        {"output": T(64, 128, stages=4, boxes=True)},
        {"output": T(32, 256, stages=4, boxes=True)},
    ],
]
"""The GEMMs run beside experts, and have fewer programs than those of a dense layer."""


def axes(
    batch: int, quick: bool, *, experts: bool = True, fp8: bool = False
) -> list[list[dict[str, Any]]]:
    """Returns the changes to try, by axis."""
    if not experts:
        return IN_FP8 if fp8 else DENSE
    ahead = [[{"ahead": batch not in AHEAD_ROWS}]] if batch <= moe_decode.MAX_TOKENS else []
    if fp8:
        return [*ahead, *(axis[: 1 if quick else None] for axis in EXPERTS_IN_FP8)]
    attention = FEW_ROWS if batch <= 2 else SOME_ROWS
    tiles = EXPERT_TILES[moe_decode.batch_class(batch)]
    return [
        *ahead,
        [{"attention": config} for config in attention[: 1 if quick else None]],
        [{"tiles": each} for each in tiles[: 1 if quick else None]],
        [{"early": batch > decode_attention.EARLY_ROWS}],
        [{"prefetch": (4, 4)}, {"prefetch": (8, 4)}, {"prefetch": (0, 0)}],
    ]


class Stack:
    """The released decoder, a pool, and sequences of ``POSITIONS`` positions."""

    def __init__(self, rows: int, family: str, *, fp8: bool) -> None:
        self.fp8 = fp8
        self.config = parse_model_config({}, family=family)
        loaded = random_checkpoint(self.config, 0, DTYPE, DEVICE, keep_fp8=True)
        tensors = pack_weights(self.config, loaded.tensors)
        self.text = FusedText(
            self.config.text,
            tensors,
            max_rows=rows,
            page_size=PAGE,
            pdl=True,
            fp8=fp8,
            fp8_decode=fp8,
        )
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

    def body(self, batch: int) -> Callable[[], Tensor]:
        decode = DecodePass(
            self.config.text,
            self.text._layers,
            self.text._post_ln,
            (self.text._cos, self.text._sin),
            max_rows=batch,
            page_size=PAGE,
            pdl=True,
            fp8=self.text._fp8_decode,
        )
        x, normed = torch.empty_like(self.start[:batch]), torch.empty_like(self.start[:batch])

        def run() -> Tensor:
            x.copy_(self.start[:batch])
            rows = self.positions[:batch], self.seqs[:batch], self.table
            decode(x, *rows, self.keys, self.values, normed=normed, shared=None)
            return normed

        return run


def captured(body: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
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
    """Returns the median of consecutive replays. Each group of replays has new random inputs."""
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
    """Prints the kernels of one MoE layer, from the start of one LayerNorm to the start of the next."""
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


class Bench:
    """Compares the variants with the reference at one batch size."""

    def __init__(self, stack: Stack, batch: int) -> None:
        self._stack, self._batch = stack, batch
        self._layers = stack.config.text.n_layers
        print(f"batch {batch}: ms of {self._layers} layers, us a layer (mean), relative error")
        # A router's near tie may fall otherwise with weights in FP8, and a row gets another expert.
        self._limit = 0.3 if stack.fp8 and stack.config.text.moe is not None else 0.15
        self._reference: Tensor | None = None
        self.graphs: dict[Variant, torch.cuda.CUDAGraph] = {}

    def ms(self, variant: Variant) -> float:
        def refresh() -> None:
            self._stack.start.normal_()

        torch.manual_seed(2)
        refresh()
        with variant.applied(self._batch):
            body = self._stack.body(self._batch)
            got = body().clone()
            if self._reference is None:
                self._reference = got
            off = error(got, self._reference)
            if not off < self._limit:
                sys.exit(f"WRONG: batch {self._batch}, {variant}: relative error {off:.2e}")
            graph = self.graphs[variant] = captured(body)
        graph.replay()
        ms = median_ms(graph, refresh)
        print(f"  {ms:7.4f} {1e3 * ms / self._layers:6.1f}  {off:.1e}  {variant}", flush=True)
        return ms


def measure(stack: Stack, batch: int, quick: bool, with_timeline: bool) -> None:
    bench = Bench(stack, batch)
    bench.ms(Variant(reference=True))
    best = served = Variant()
    least = bench.ms(served)
    for axis in axes(batch, quick, experts=stack.config.text.moe is not None, fp8=stack.fp8):
        so_far = best
        for change in axis:
            variant = replace(so_far, **change)
            ms = bench.ms(variant)
            if ms < least:
                least, best = ms, variant
    print(f"  best: {least:.4f}, {best}")
    if with_timeline:
        for variant in dict.fromkeys((served, best)):
            print(f"  {variant}:")
            timeline(bench.graphs[variant], stack.config.text.n_layers)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("moondream2", "moondream3"), default="moondream3")
    parser.add_argument(
        "--fp8", action="store_true", help="weights in FP8, as with --fp8-gemms all"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument(
        "--timeline",
        action="store_true",
        help="print the start and end of the kernels of three layers",
    )
    parser.add_argument("--quick", action="store_true", help="fewer tiles")
    args = parser.parse_args()
    began = time.monotonic()
    stack = Stack(max(args.batches), args.model, fp8=args.fp8)
    kept = first_fork(torch.cuda.Stream())
    torch.cuda.synchronize()
    print(f"weights made after {time.monotonic() - began:.0f} s", flush=True)
    for batch in args.batches:
        measure(stack, batch, args.quick, args.timeline and batch in (1, 4))
        print(f"  after {time.monotonic() - began:.0f} s", flush=True)
    del kept


if __name__ == "__main__":
    main()
