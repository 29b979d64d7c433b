"""Measures the experts of prefill on a GPU: checks every way against float64, then reports TFLOP/s by tokens.

    python -m benchmarks.kernels.moe_prefill [--tokens 760,3800] [--layers N] [--parts] [--json PATH]

The time of a layer is that of a captured graph over different layers (routing, grouping, sorting, both products, the
sum onto the residual), with new random logits before each replay. --parts shows the time of each kernel by torch's
profiler. A wrong way is not timed, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.moe import DEVICE, DIM, DTYPE, INNER, E, K, median_us, tensors, wanted
from benchmarks.kernels.random_experts import random_experts
from kestrel_engine.kernels.linear.fp8_rows import quantise_rows
from kestrel_engine.kernels.moe import hopper as moe_hopper
from kestrel_engine.kernels.moe.prefill import Tile, Tiles, moe_prefill, tiles_for
from kestrel_engine.kernels.moe.route import route
from kestrel_engine.kernels.moe.tile import Experts

TOKENS = (256, 760, 1500, 3000, 3800, 11_700)
# Rounding to bfloat16, and to e4m3 of both products' inputs.
EXACT, ROUNDED = 6e-3, 6e-2


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    fp8: bool = False
    triton: bool = False
    tiles: Tiles | None = None
    rows: int | None = None

    @property
    def bound(self) -> float:
        return ROUNDED if self.fp8 else EXACT

    def __call__(
        self, u: Tensor, weights: Tensor, chosen: Tensor, e: Experts, **kwargs: Tensor
    ) -> Tensor:
        tiles = self.tiles
        in_fp8 = quantise_rows(u) if self.fp8 else None
        if self.triton and tiles is None:
            tiles = tiles_for(1, chosen.numel(), E)
        if self.rows:
            # Pairs' outputs, without the sum of a token's.
            outputs = torch.empty((chosen.numel(), DIM), dtype=u.dtype, device=u.device)
            moe_hopper.products(u, chosen, e, outputs, in_fp8=in_fp8, tile=self.rows)
            return outputs
        return moe_prefill(u, weights, chosen, *tensors(e), tiles=tiles, in_fp8=in_fp8, **kwargs)


WAYS = [
    Way("triton", triton=True),
    Way("triton 128", tiles=Tiles(128, Tile(128, 64, 8, 4, True, True), Tile(256, 64, 8, 4, True, True))),
    Way("hopper"),
    Way("hopper fp8", fp8=True),
]  # fmt: skip
PAIRS = [
    Way("pairs 128", rows=128),
    Way("pairs 64", rows=64),
    Way("pairs fp8 128", fp8=True, rows=128),
    Way("pairs fp8 64", fp8=True, rows=64),
]


def relative_error(got: Tensor, reference: Tensor) -> float:
    return float((got.double() - reference).norm() / reference.norm())


def check(e: Experts) -> set[str]:
    """Returns the names of wrong ways, on poisoned outputs: uneven counts, one expert for all tokens, two for none."""
    wrong = set()
    for tokens, favourite in ((760, False), (1001, True), (3800, False)):
        u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
        logits = torch.randn(tokens, E, device=DEVICE)
        if favourite:
            logits[:, 3] = 9.0
            logits[:, [0, 60]] = -9.0
        weights, chosen = route(logits, K)
        reference = wanted(u, weights, chosen, e)
        for way in WAYS + PAIRS:
            got = way(u, weights, chosen, e, out=torch.full_like(u, float("nan")))
            again = way(u, weights, chosen, e)
            repeats = torch.equal(got, again)
            if way in PAIRS:
                pairs = got.view(tokens, K, DIM).double()
                got = (pairs * weights[..., None].double()).sum(1)
            error = relative_error(got, reference)
            right = repeats and error < way.bound
            if not right:
                wrong.add(way.name)
            said = "" if right else "  WRONG" if repeats else "  WRONG: differs from run to run"
            print(f"{tokens:>6} {way.name:<14} relative error {error:.2e}{said}", flush=True)
    return wrong


def compile_one(way: Way) -> None:
    """Compiles kernels in a separate process, which fills Triton's cache on disk."""
    e = random_experts(E, DIM, INNER, dtype=DTYPE, device=DEVICE, fp8=True)
    for tokens in (256, 760, 1500):
        u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
        weights, chosen = route(torch.randn(tokens, E, dtype=DTYPE, device=DEVICE), K)
        way(u, weights, chosen, e, add_to=u)
    torch.cuda.synchronize()


def compile_all() -> None:
    with multiprocessing.get_context("spawn").Pool(min(len(WAYS + PAIRS), 12)) as pool:
        pool.map(compile_one, WAYS + PAIRS, chunksize=1)


def layer_us(way: Way, layers: list[Experts], tokens: int, replays: int) -> float:
    u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)
    x = torch.randn_like(u)
    logits = torch.randn(len(layers), tokens, E, dtype=DTYPE, device=DEVICE)

    def body() -> None:
        for e, of_layer in zip(layers, logits, strict=True):
            weights, chosen = route(of_layer, K)
            way(u, weights, chosen, e, add_to=x, out=x)

    return median_us(body, logits.normal_, replays) / len(layers)


def parts(way: Way, layers: list[Experts], tokens: int) -> list[tuple[str, float]]:
    """Returns microseconds of each kernel, as a mean of the layers."""
    u = torch.randn(tokens, DIM, dtype=DTYPE, device=DEVICE)

    def body() -> None:
        for e in layers:
            logits = torch.randn(tokens, E, dtype=DTYPE, device=DEVICE)
            way(u, *route(logits, K), e, add_to=u)

    body()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        body()
        torch.cuda.synchronize()
    took = [
        (event.key, event.self_device_time_total / 2 / len(layers))
        for event in profile.key_averages()
    ]
    return sorted(took, key=lambda part: -part[1])[:9]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=TOKENS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument(
        "--parts", action="store_true", help="show each kernel's time at 760 and 3,800 tokens"
    )
    parser.add_argument("--json", help="write every figure to this path")
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    compile_all()
    print(f"compiled, {time.monotonic() - began:.0f} s", flush=True)
    layers = [
        random_experts(E, DIM, INNER, dtype=DTYPE, device=DEVICE, fp8=True)
        for _ in range(args.layers)
    ]
    wrong = check(layers[0])
    print(
        f"checked, {time.monotonic() - began:.0f} s\n\n{'tokens':>7} way"
        + " " * 14
        + "us/layer  TFLOP/s"
    )
    rows: list[dict[str, object]] = []
    for tokens in args.tokens:
        operations = 2 * tokens * (DIM * E + 3 * K * DIM * INNER)
        for way in (way for way in WAYS + PAIRS if way.name not in wrong):
            us = layer_us(way, layers, tokens, args.replays)
            rows.append(
                {"tokens": tokens, "way": way.name, "us": us, "TFLOP/s": operations / us / 1e6}
            )
            print(f"{tokens:>7} {way.name:<16} {us:8.1f} {operations / us / 1e6:8.0f}", flush=True)
    if args.parts:
        for tokens in (760, 3800):
            for way in WAYS[2:]:
                print(f"\n{way.name}, {tokens} tokens")
                for name, us in parts(way, layers, tokens):
                    print(f"    {us:8.1f} us {name[:60]}")
    print(f"{time.monotonic() - began:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if wrong:
        sys.exit(f"WRONG: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
