"""Measures the gain of FP8 for the vision tower and for prefill: GEMMs, the kernels around them, one MLP, whole passes.

python -m benchmarks.kernels.fp8_gemms

It first compares the results with float64 computations on the rounded operands. Times are those of captured graphs with
the true shapes. The exit status is 1 if a GEMM or a kernel is wrong.

"Float32 sums" means that the tensor cores' sums are moved to float32 every 128 inputs, which the engine does not do.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kestrel_engine.kernels.layer_norm import layer_norm
from kestrel_engine.kernels.linear.fp8_rows import Fp8Rows, layer_norm_fp8, quantise_rows
from kestrel_engine.models.layers import Linear
from kestrel_engine.runtime.gpu.gemm import Fp8Gelu, Fp8Linear, add_linear, linear, linear_gelu
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights

from .vision import (
    DEVICE,
    DTYPE,
    ON_GPU,
    Prefixes,
    graph_seconds,
    model_config,
    prefix_flops,
    random_checkpoint,
    random_crops,
    tower_flops,
)

REPEATS = 15
MOST_LOST = 0.06 if ON_GPU else 0.1
"""Relative error of an FP8 product, rounded to FP8 once more or not: 0.037 and 0.047. The interpreter rounds worse."""


def us(body: Callable[[], object], repeats: int = REPEATS) -> float:
    """Returns microseconds of a call; on a CPU, of a single call."""
    if ON_GPU:
        # Kernels are compiled and attention is planned before anything is captured.
        body()
        torch.cuda.synchronize()
        return 1e6 * graph_seconds(body, repeats)
    began = time.perf_counter()
    body()
    return 1e6 * (time.perf_counter() - began)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def precise(x: Fp8Rows, layer: Fp8Linear) -> Tensor:
    """`Fp8Linear` with float32 sums."""
    return torch._scaled_mm(
        x.values,
        layer.weight.T,
        x.scales,
        layer.scales,
        bias=layer.bias,
        out_dtype=layer.dtype,
        use_fast_accum=False,
    )


class Shapes:
    """Weights and inputs of one block: ``dim`` wide, ``ff`` inside, ``rows`` tokens."""

    def __init__(self, rows: int, dim: int, ff: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE).to(DTYPE)

        def layer(outputs: int, inputs: int) -> Linear:
            return Linear(random(outputs, inputs) * inputs**-0.5, random(outputs) * 0.1)

        self.rows, self.dim, self.ff = rows, dim, ff
        self.x, self.u, self.hidden = random(rows, dim), random(rows, dim), random(rows, ff)
        self.qkv, self.proj = layer(3 * dim, dim), layer(dim, dim)
        self.fc1, self.fc2 = layer(ff, dim), layer(dim, ff)
        self.qkv8, self.fc18 = (Fp8Linear.of(x.weight, x.bias) for x in (self.qkv, self.fc1))
        self.fc28, self.proj8 = (Fp8Linear.of(x.weight) for x in (self.fc2, self.proj))
        self.writes8 = Fp8Linear.of(torch.cat([self.proj.weight, self.fc2.weight], dim=1))
        assert self.fc1.bias is not None
        self.gelu8 = Fp8Gelu.of(self.fc1.weight, self.fc1.bias)
        self.norms = self.u.float().norm(dim=1) if self.gelu8.wants_norms else None
        self.gain, self.shift = random(dim), random(dim)
        self.pending = torch.randn(dim, device=DEVICE)


def check(shapes: Shapes) -> list[str]:
    """Returns the names of wrong results."""
    wrong = []
    some = slice(0, 300)
    for name, layer8, plain, x in (
        ("qkv", shapes.qkv8, shapes.qkv, shapes.u),
        ("fc1", shapes.fc18, shapes.fc1, shapes.u),
        ("fc2", shapes.fc28, Linear(shapes.fc2.weight), shapes.hidden),
    ):
        rows = quantise_rows(x)
        bias = 0 if plain.bias is None else plain.bias.double()
        exact = x[some].double() @ plain.weight.double().T + bias
        rounded = rows.values[some].double() * rows.scales[some]
        rounded = rounded @ (layer8.weight.double() * layer8.scales.T).T + bias
        found = layer8(rows)[some]
        own, slow = off(found, rounded), off(precise(rows, layer8)[some], rounded)
        lost = off(found, exact)
        bf16 = off(linear(x, plain)[some], exact)
        print(
            f"{name:<5} from float64: bfloat16 {bf16:.4f}, FP8 {lost:.4f};"
            f" from the product of what was rounded: {own:.5f}, with float32 sums {slow:.5f}"
        )
        if own > 5e-3 or not lost < MOST_LOST:
            wrong.append(name)
    assert shapes.fc1.bias is not None
    exact = shapes.u[some].double() @ shapes.fc1.weight.double().T + shapes.fc1.bias.double()
    exact = torch.nn.functional.gelu(exact, approximate="tanh")
    for name, norms in (("in one", shapes.norms), ("in two", None)):
        hidden = shapes.gelu8(quantise_rows(shapes.u), norms)
        lost = off(hidden.values[some].double() * hidden.scales[some], exact)
        print(f"fc1, GELU and rounding {name}: from float64 {lost:.4f}")
        if not lost < MOST_LOST:
            wrong.append(f"GELU {name}")
    return wrong


def table(title: str, rows: dict[str, tuple[Callable[[], object], float, float]]) -> None:
    """``rows``: name to the work, its FLOP and its bytes."""
    print(f"\n{title}")
    for name, (body, flop, moved) in rows.items():
        took = us(body)
        rate = f"{flop / took / 1e6:8.0f} TFLOP/s" if flop else f"{moved / took / 1e6:8.2f} TB/s"
        print(f"  {name:<44} {took:9.1f} us {rate}")


def time_products(s: Shapes, title: str) -> None:
    u8, hidden8 = quantise_rows(s.u), quantise_rows(s.hidden, gelu=True)
    both8 = quantise_rows(s.hidden, gelu=True, left=s.u)
    wide, narrow = 2 * s.rows * s.dim * s.ff, 2 * s.rows * s.dim**2
    rows: dict[str, tuple[Callable[[], object], float, float]] = {
        "qkv, bfloat16": (lambda: linear(s.u, s.qkv), 3 * narrow, 0),
        "qkv, FP8": (lambda: s.qkv8(u8), 3 * narrow, 0),
        "qkv, FP8, float32 sums": (lambda: precise(u8, s.qkv8), 3 * narrow, 0),
        "fc1 with GELU, bfloat16": (lambda: linear_gelu(s.u, s.fc1), wide, 0),
        "fc1, FP8": (lambda: s.fc18(u8), wide, 0),
        "fc1, FP8, float32 sums": (lambda: precise(u8, s.fc18), wide, 0),
        "fc1, GELU and rounding in one": (lambda: s.gelu8(u8, s.norms), wide, 0),
        "fc1, GELU and rounding in two": (lambda: s.gelu8(u8, None), wide, 0),
        "fc2 added, bfloat16": (lambda: add_linear(s.x, s.hidden, s.fc2.weight), wide, 0),
        "fc2, FP8": (lambda: s.fc28(hidden8), wide, 0),
        "fc2, FP8, float32 sums": (lambda: precise(hidden8, s.fc28), wide, 0),
        "proj added, bfloat16": (lambda: add_linear(s.x, s.u, s.proj.weight), narrow, 0),
        "proj, FP8": (lambda: s.proj8(u8), narrow, 0),
        "proj and fc2 in one, FP8": (lambda: s.writes8(both8), wide + narrow, 0),
    }
    table(f"{title}: products", rows)


def time_kernels(s: Shapes, title: str) -> None:
    out, add = torch.empty_like(s.x), torch.zeros_like(s.x)
    half = DTYPE.itemsize * s.rows
    norm = partial(layer_norm_fp8, s.x, s.gain, s.shift, pending=s.pending)
    table(
        f"{title}: kernels around them",
        {
            "LayerNorm": (
                lambda: layer_norm(s.x, s.gain, s.shift, pending=s.pending, out=out),
                0,
                2 * half * s.dim,
            ),
            "LayerNorm to FP8": (norm, 0, (half + s.rows) * s.dim),
            "LayerNorm to FP8 that adds": (partial(norm, add=add), 0, (3 * half + s.rows) * s.dim),
            "GELU to FP8": (
                lambda: quantise_rows(s.hidden, gelu=True),
                0,
                (half + s.rows) * s.ff,
            ),
            "GELU to FP8, attention at its left": (
                lambda: quantise_rows(s.hidden, gelu=True, left=s.u),
                0,
                (half + s.rows) * (s.ff + s.dim),
            ),
            "rows to FP8, of attention": (lambda: quantise_rows(s.u), 0, (half + s.rows) * s.dim),
        },
    )


def mlp(s: Shapes, out: Tensor) -> None:
    """Computes the MLP in FP8."""
    norm = partial(layer_norm_fp8, s.x, s.gain, s.shift, pending=s.pending)
    s.fc28(s.gelu8(norm(norms=s.norms), s.norms), out=out)


def mlp_bf16(s: Shapes, u: Tensor) -> None:
    layer_norm(s.x, s.gain, s.shift, pending=s.pending, out=u)
    add_linear(s.x, linear_gelu(u, s.fc1), s.fc2.weight)


def time_mlp(s: Shapes, title: str) -> None:
    out, flop = torch.empty_like(s.x), 4 * s.rows * s.dim * s.ff
    rows: dict[str, tuple[Callable[[], object], float, float]] = {
        "bfloat16": (lambda: mlp_bf16(s, out), flop, 0),
        "FP8": (lambda: mlp(s, out), flop, 0),
    }
    table(f"{title}: LayerNorm and MLP", rows)


def passes(repeats: int, *, quick: bool) -> None:
    """Measures whole passes of the tower and of prefix prefill."""
    config = model_config(dry_run=not ON_GPU)
    tensors = pack_weights(config, random_checkpoint(config, 0, DTYPE, DEVICE).tensors)
    print("\nThe tower, whole, in a graph")
    towers = [FusedVision(config.vision, tensors, fp8=fp8) for fp8 in (False, True)]
    crops = random_crops(config.vision, 1 if quick else 7)
    plain, rounded = (tower.encode_crops(crops).float() for tower in towers)
    print(f"  features in FP8 from those in {DTYPE}: {off(rounded, plain.double()):.4f}")
    for count in (1,) if quick else (56, 28, 9, 2, 1):
        crops = random_crops(config.vision, count)
        flop = tower_flops(config.vision, count)
        took = [us(partial(tower.encode_crops, crops), repeats) for tower in towers]
        rates = [f"{t / 1e3:8.2f} ms {flop / t / 1e6:6.0f} TFLOP/s" for t in took]
        print(f"  {count:>3} crops   {'   FP8 '.join(rates)}")
    del towers
    print("\nPrefix prefill, whole, in a graph")
    texts = [FusedText(config.text, tensors, max_rows=1, page_size=1, fp8=f) for f in (False, True)]
    for count in (1,) if quick else (16, 6, 4, 1):
        prefixes = Prefixes.of(config, count)
        flop = prefix_flops(config.text, count, prefixes.length)
        plain, rounded = (prefixes.fused(text).float() for text in texts)
        took = [us(partial(prefixes.fused, text), repeats) for text in texts]
        rates = [f"{t / 1e3:8.2f} ms {flop / t / 1e6:6.0f} TFLOP/s" for t in took]
        lost = off(rounded, plain.double())
        print(f"  {count:>3} images   {'   FP8 '.join(rates)}   stream off by {lost:.4f}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, also without a GPU")
    args = parser.parse_args()
    if not (ON_GPU or args.quick):
        sys.exit("no GPU: only --quick")
    torch.manual_seed(0)
    began = time.perf_counter()
    sets = {
        "tower, 56 crops": (56 * 729, 1152, 4304),
        "tower, 9 crops": (9 * 729, 1152, 4304),
        "prefill, 16 images": (16 * 730, 2048, 8192),
        "prefill, 1 image": (730, 2048, 8192),
    }
    if args.quick:
        sets = {"tiny": (8, 64, 96)}
    wrong: list[str] = []
    for title, (rows, dim, ff) in sets.items():
        shapes = Shapes(rows, dim, ff)
        print(
            f"\n== {title}: [{rows}, {dim}], {ff} inside (after {time.perf_counter() - began:.0f} s)"
        )
        wrong += [f"{title}: {name}" for name in check(shapes)]
        time_products(shapes, title)
        time_kernels(shapes, title)
        time_mlp(shapes, title)
    passes(5, quick=args.quick)
    print(f"\n{time.perf_counter() - began:.0f} s in all")
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
