"""Measures Moondream 3's experts on a GPU: candidates against float64, decode against its floor, prefill in TFLOP/s.

    python -m benchmarks.kernels.moe [--quick] [--json PATH]

Decode: microseconds of routing, up and down of one layer, as medians of replays of a captured graph over layers with
different weights, with new random logits before each replay. The floor is the time to read the experts in use, in their
stored format, at the machine's copy rate. Prefill: routing, grouping, products and the sum onto the residual, with the
FLOP of router and experts. The exit status is 1 if a candidate is wrong.
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
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.device.rates import copy_rate
from benchmarks.kernels.random_experts import random_experts
from kestrel_engine.kernels.moe import decode as decode
from kestrel_engine.kernels.moe import prefill as prefill
from kestrel_engine.kernels.moe.route import route
from kestrel_engine.kernels.moe.tile import Experts

E, K, DIM, INNER = 64, 8, 2048, 1024
DTYPE = torch.bfloat16
# A candidate that this GPU or this Triton does not take is left out; a wrong one ends the run.
REFUSALS = (triton.TritonError, RuntimeError)
DEVICE = "cuda"

D = decode.Tile
# By bytes of a weight and whether there is one token: candidates of up, and of down.
DECODE_TILES: dict[tuple[int, bool], tuple[list[D], list[D]]] = {
    (1, True): (
        [D(8, 512, 4, 3), D(4, 1024, 4, 2), D(8, 1024, 8, 2), D(16, 256, 4, 4), D(4, 512, 4, 4)],
        [D(16, 512, 4, 2), D(8, 1024, 4, 1), D(16, 1024, 8, 1), D(32, 256, 4, 4)],
    ),
    (1, False): (
        [
            D(32, 128, 4, 4), D(32, 128, 4, 6), D(32, 256, 4, 3), D(64, 128, 4, 4),
            D(64, 128, 8, 4), D(16, 256, 4, 4, False), D(32, 128, 4, 4, False),
        ],
        [
            D(64, 128, 4, 4), D(64, 128, 4, 6), D(64, 256, 4, 3), D(128, 128, 4, 4),
            D(128, 128, 8, 4), D(32, 256, 4, 4, False), D(64, 128, 4, 4, False),
        ],
    ),
    (2, True): (
        [D(4, 512, 4, 3), D(4, 1024, 8, 2), D(8, 512, 4, 3), D(4, 1024, 4, 2)],
        [D(8, 512, 4, 2), D(8, 1024, 8, 1), D(16, 512, 4, 2), D(8, 1024, 4, 1)],
    ),
    (2, False): (
        [D(32, 64, 4, 4), D(32, 64, 4, 6), D(32, 128, 4, 4), D(64, 64, 4, 4), D(32, 128, 4, 4, False)],
        [D(64, 64, 4, 4), D(64, 64, 4, 6), D(64, 128, 4, 4), D(128, 64, 4, 4), D(64, 128, 4, 4, False)],
    ),
}  # fmt: skip
P = prefill.Tile
# By bytes of a weight: candidates for few, for some, and for many pairs of an expert.
PREFILL_TILES: dict[tuple[int, int], list[prefill.Tiles]] = {
    (1, 24): [
        prefill.Tiles(16, P(64, 128, 4, 4, True, True), P(128, 128, 4, 4, True, True)),
        prefill.Tiles(32, P(64, 128, 4, 3, True, True), P(128, 128, 4, 3, True, True)),
        prefill.Tiles(32, P(64, 128, 4, 4, True, False), P(64, 128, 4, 4, True, False)),
    ],
    (1, 96): [
        prefill.Tiles(64, P(64, 128, 4, 3, True, True), P(128, 128, 4, 3, True, True)),
        prefill.Tiles(64, P(64, 64, 4, 4, True, True), P(128, 64, 4, 4, True, True)),
        prefill.Tiles(128, P(64, 128, 8, 3, True, True), P(128, 128, 8, 3, True, True)),
    ],
    (1, 0): [
        prefill.Tiles(128, P(64, 128, 8, 3, True, True), P(128, 128, 8, 3, True, True)),
        prefill.Tiles(128, P(128, 64, 8, 4, True, True), P(256, 64, 8, 4, True, True)),
    ],
    (2, 24): [
        prefill.Tiles(16, P(64, 64, 4, 4, True, True), P(128, 64, 4, 4, True, True)),
        prefill.Tiles(32, P(64, 64, 4, 4, True, True), P(128, 64, 4, 4, True, True)),
        prefill.Tiles(64, P(64, 64, 4, 4, False, True), P(128, 64, 4, 4, False, True)),
    ],
    (2, 96): [
        prefill.Tiles(64, P(64, 64, 4, 4, True, True), P(128, 64, 4, 4, True, True)),
        prefill.Tiles(64, P(128, 64, 4, 3, False, True), P(256, 64, 4, 3, False, True)),
        prefill.Tiles(128, P(128, 64, 8, 3, False, True), P(256, 64, 8, 3, False, True)),
    ],
    (2, 0): [
        prefill.Tiles(128, P(128, 64, 8, 3, False, True), P(256, 64, 8, 3, False, True)),
        prefill.Tiles(128, P(128, 64, 8, 4, False, True), P(256, 64, 8, 4, False, True)),
        prefill.Tiles(128, P(128, 64, 8, 3, False, False), P(256, 64, 8, 3, False, False)),
        prefill.Tiles(128, P(64, 64, 4, 4, False, True), P(128, 64, 4, 4, False, True)),
        prefill.Tiles(256, P(64, 64, 8, 3, False, True), P(128, 64, 8, 3, False, True)),
    ],
}

Job = tuple[str, int, int, Any, bool]


def jobs(quick: bool) -> list[Job]:
    """Returns everything to compile as (path, bytes of a weight, tokens, tiles, pdl)."""
    found: list[Job] = []
    for size in (1, 2):
        for tokens in (1, 16) if quick else (1, 16, 64):
            ups, downs = DECODE_TILES[size, tokens == 1]
            for i in range(max(len(ups), len(downs))):
                pair = decode.Tiles(ups[min(i, len(ups) - 1)], downs[min(i, len(downs) - 1)])
                found += [("decode", size, tokens, pair, pdl) for pdl in (False, True)]
        for (s, limit), tiles in PREFILL_TILES.items():
            if s == size:
                tokens = {24: 64, 96: 730, 0: 11680}[limit]
                found += [("prefill", size, tokens, t, False) for t in tiles]
    return found


def experts_of(size: int, num_experts: int = E) -> Experts:
    return random_experts(num_experts, DIM, INNER, dtype=DTYPE, device=DEVICE, fp8=size == 1)


def tensors(e: Experts) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return e.fc1, e.fc2, e.fc1_scale, e.fc2_scale


def compile_some(mine: list[Job]) -> None:
    """Fills Triton's cache on disk, in a separate process. The run reports kernels that do not fit."""
    layers = {size: experts_of(size) for size in {job[1] for job in mine}}
    for path, size, tokens, tiles, pdl in mine:
        u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
        with contextlib.suppress(*REFUSALS):
            weights, chosen = route(torch.randn(tokens, E, dtype=DTYPE, device=DEVICE), K, pdl=pdl)
            layer = tensors(layers[size])
            if path == "decode":
                decode.moe_decode(u, weights, chosen, *layer, pdl=pdl, tiles=tiles)
            else:
                prefill.moe_prefill(u, weights, chosen, *layer, add_to=u, tiles=tiles)
            torch.cuda.synchronize()


def compile_all(todo: list[Job]) -> None:
    workers = min(14, multiprocessing.cpu_count())
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(compile_some, [todo[i::workers] for i in range(workers)], chunksize=1)


def wanted(u: Tensor, weights: Tensor, chosen: Tensor, e: Experts) -> Tensor:
    """Returns the result in float64, from the stored weights."""
    total = torch.zeros(u.shape, dtype=torch.float64, device=u.device)
    for expert in chosen.unique().tolist():
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        fc1, fc2 = e.fc1[expert].double(), e.fc2[expert].double()
        if e.fc1_scale is not None and e.fc2_scale is not None:
            fc1, fc2 = fc1 * e.fc1_scale[expert, :, None], fc2 * e.fc2_scale[expert, :, None]
        h, g = F.linear(u[token].double(), fc1).chunk(2, dim=-1)
        output = F.linear(F.gelu(h) * (g + 1), fc2)
        total.index_add_(0, token, output * weights[token, choice, None].double())
    return total


def check(todo: list[Job], layers: dict[int, Experts]) -> None:
    """Runs every candidate once on poisoned outputs, with one preferred expert and one unused expert."""
    references: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for path, size, tokens, tiles, pdl in todo:
        tokens = min(tokens, 730)
        e = layers[size]
        if (size, tokens) not in references:
            u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
            logits = torch.randn(tokens, E, device=DEVICE)
            logits[:, 3] = 9.0
            logits[:, 60] = -9.0
            weights, chosen = route(logits, K)
            references[size, tokens] = u, weights, chosen, wanted(u, weights, chosen, e)
        u, weights, chosen, reference = references[size, tokens]
        try:
            if path == "decode":
                out = torch.full((K, tokens, DIM), float("nan"), device=DEVICE)
                parts = decode.moe_decode(
                    u, weights, chosen, *tensors(e), out=out, pdl=pdl, tiles=tiles
                )
                got, bound = parts.sum(0), 4e-3
            else:
                out = torch.full_like(u, float("nan"))
                got = prefill.moe_prefill(u, weights, chosen, *tensors(e), out=out, tiles=tiles)
                bound = 6e-3
        except REFUSALS as error:
            print(f"refused: {path} {size} T={tokens} {tiles}: {str(error)[:120]}")
            continue
        error = float((got.double() - reference).norm() / reference.norm())
        if not error < bound:
            sys.exit(
                f"WRONG: {path} {size} T={tokens} {tiles} pdl={pdl}: relative error {error:.2e}"
            )


def median_us(body: Callable[[], object], refresh: Callable[[], object], replays: int) -> float:
    """Returns the median of a captured graph's replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for i in range(replays + 2):
        refresh()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) * 1000)
    return float(statistics.median(times))


class Decode:
    """A stack of layers in one format, and batches of one size through it."""

    def __init__(self, size: int, tokens: int, layers: list[Experts]) -> None:
        self.size, self.tokens, self.layers = size, tokens, layers
        self.u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
        self.logits = torch.randn(len(layers), tokens, E, dtype=DTYPE, device=DEVICE)
        self.out = torch.empty(K, tokens, DIM, device=DEVICE)
        self.chosen: list[Tensor] = []
        self.touched: list[float] = []

    def run(self, tiles: decode.Tiles, pdl: bool) -> None:
        self.chosen = []
        for e, logits in zip(self.layers, self.logits, strict=True):
            weights, chosen = route(logits, K, pdl=pdl)
            self.chosen.append(chosen)
            decode.moe_decode(
                self.u, weights, chosen, *tensors(e), out=self.out, pdl=pdl, tiles=tiles
            )

    def refresh(self) -> None:
        if self.chosen:
            counts = [chosen.unique().numel() for chosen in self.chosen]
            self.touched.append(statistics.mean(counts))
        self.logits.normal_()

    def us(self, tiles: decode.Tiles, pdl: bool, replays: int = 7) -> float:
        self.touched = []
        try:
            total = median_us(lambda: self.run(tiles, pdl), self.refresh, replays)
        except REFUSALS:
            return float("inf")
        return total / len(self.layers)

    def floor_us(self, rate: float) -> float:
        """Returns the floor of the last timing: the time to read the used experts at ``rate`` bytes/s."""
        touched = statistics.mean(self.touched[2:])
        return touched * 3 * DIM * INNER * self.size / rate * 1e6


def tune_decode(stack: Decode, quick: bool) -> tuple[decode.Tiles, str]:
    """Finds the best down for the first up, then the best up for that down."""
    ups, downs = DECODE_TILES[stack.size, stack.tokens == 1]
    if quick:
        ups, downs = ups[:3], downs[:3]
    of_down = {d: stack.us(decode.Tiles(ups[0], d), True) for d in downs}
    down = min(of_down, key=lambda d: of_down[d])
    of_up = {u: stack.us(decode.Tiles(u, down), True) for u in ups}
    up = min(of_up, key=lambda u: of_up[u])

    def shown(of: dict[D, float]) -> str:
        ranked = sorted(of, key=lambda t: of[t])
        return ", ".join(f"{tuple(t)} {of[t]:.1f}" for t in ranked)

    return decode.Tiles(up, down), f"    up: {shown(of_up)}\n    down: {shown(of_down)}"


def measure_decode(
    size: int, layers: list[Experts], rate: float, quick: bool
) -> list[dict[str, Any]]:
    name = {1: "fp8", 2: "bf16"}[size]
    found: list[dict[str, Any]] = []
    best: dict[int, decode.Tiles] = {}
    for tokens in (1, 16, 4) if quick else (1, 16, 64, 4):
        stack = Decode(size, tokens, layers)
        details = ""
        limit = decode.batch_class(tokens)
        if limit not in best:
            best[limit], details = tune_decode(stack, quick)
        tiles = best[limit]
        plain, pdl = stack.us(tiles, False, 15), stack.us(tiles, True, 15)
        floor = stack.floor_us(rate)
        found.append({
            "path": "decode", "experts": name, "tokens": tokens, "us": plain, "us with pdl": pdl,
            "floor us": floor, "share": floor / min(plain, pdl), "touched": statistics.mean(stack.touched),
            "tiles": str(tiles),
        })  # fmt: skip
        print(
            f"{name:>5} {tokens:>6} {plain:8.1f} {pdl:8.1f} {floor:8.1f} {floor / min(plain, pdl):6.0%}"
            f" {statistics.mean(stack.touched):5.1f}\n{details}",
            flush=True,
        )
    for limit, tiles in best.items():
        print(f"    ({size}, {limit}): Tiles(Tile{tuple(tiles.up)}, Tile{tuple(tiles.down)}),")
    return found


def prefill_us(
    layers: list[Experts], u: Tensor, x: Tensor, logits: Tensor, tiles: prefill.Tiles
) -> float:
    """Returns a layer's time. Each replay has new random ``logits`` [layers, T, E]."""

    def body() -> None:
        for e, of_layer in zip(layers, logits, strict=True):
            weights, chosen = route(of_layer, K)
            prefill.moe_prefill(u, weights, chosen, *tensors(e), add_to=x, out=x, tiles=tiles)

    return median_us(body, logits.normal_, 5) / len(layers)


def measure_prefill(size: int, layers: list[Experts], quick: bool) -> list[dict[str, Any]]:
    name = {1: "fp8", 2: "bf16"}[size]
    found: list[dict[str, Any]] = []
    for tokens in (64, 730) if quick else (64, 256, 730, 11_680):
        u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
        x = torch.randn_like(u)
        few = layers if tokens < 2000 else layers[:2]
        logits = torch.randn(len(few), tokens, E, dtype=DTYPE, device=DEVICE)
        operations = 2 * tokens * (DIM * E + 3 * K * DIM * INNER)
        mean = tokens * K / E
        limits = [24, 96] if mean <= 96 else [96, 0]
        for tiles in [t for limit in limits for t in PREFILL_TILES[size, limit]]:
            try:
                us = prefill_us(few, u, x, logits, tiles)
            except REFUSALS as error:
                print(f"refused: {name} T={tokens} {tiles}: {str(error)[:100]}")
                continue
            found.append({
                "path": "prefill", "experts": name, "tokens": tokens, "us": us,
                "TFLOP/s": operations / us / 1e6, "tiles": str(tiles),
            })  # fmt: skip
        mine = sorted((r for r in found if r["tokens"] == tokens), key=lambda r: r["us"])
        print(f"{name:>5} {tokens:>6} {mine[0]['us']:8.1f} {mine[0]['TFLOP/s']:8.0f}")
        for row in mine:
            compact = row["tiles"].replace("block_", "").replace("Tiles", "").replace("Tile", "")
            print(f"    {row['us']:.1f} {compact}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer batches and candidates")
    parser.add_argument("--json", help="write every figure to this path")
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    todo = jobs(args.quick)
    compile_all(todo)
    print(f"{len(todo)} compilations, {time.monotonic() - began:.0f} s", flush=True)
    rate = copy_rate(torch.device(DEVICE))
    stacks = {1: [experts_of(1) for _ in range(6)], 2: [experts_of(2) for _ in range(4)]}
    check(todo, {size: stack[0] for size, stack in stacks.items()})
    print(
        f"all candidates are right, {time.monotonic() - began:.0f} s; copy {rate / 1e12:.2f} TB/s"
    )
    rows: list[dict[str, Any]] = []
    print(f"\ndecode   T  us/layer      pdl    floor  share touched\n{'':>12}then tiles by time")
    for size, stack in stacks.items():
        rows += measure_decode(size, stack, rate, args.quick)
    print(f"{time.monotonic() - began:.0f} s\n\nprefill  T       us  TFLOP/s")
    for size, stack in stacks.items():
        rows += measure_prefill(size, stack, args.quick)
    print(f"all after {time.monotonic() - began:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps({"copy rate": rate, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
