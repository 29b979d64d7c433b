"""Compares plain torch with the fused passes of the vision tower and of prefix prefill on a GPU, with random weights.

    python -m benchmarks.kernels.vision [--quick] [--json PATH] [--dry-run]

It first compares the error of the fused passes with that of the plain passes, both relative to float32; the exit status
is 1 if the fused passes have larger errors. Then it reports TFLOP/s (a multiply-add of a GEMM or of attention counts as
two) and the time of each part by the profiler. The difference between all parts and the GEMMs is the possible gain.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint
from kestrel_engine.models.attention import PagedAttention, Span
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.vision import VisionModel
from kestrel_engine.runtime.gpu.gemm import add_linear, linear, linear_gelu
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.model_config import (
    ModelConfig,
    TextConfig,
    VisionConfig,
    parse_model_config,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
PARTS = {
    "patches": ("patchify",),
    "pooling": ("pool_tiles", "adaptive"),
    "layer norms": ("layer_norm",),
    "attention": ("fmha", "flash", "sdpa", "attention", "softmax", "fprop"),
    "rope and store": ("rope_store",),
    "GEMMs": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
}
"""Beginnings of a part's kernel names; the first that fits counts, the rest is "other"."""


@dataclass
class Bench:
    """The measurements, and whether all results were right."""

    figures: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    def note(self, name: str, **values: Any) -> None:
        self.figures.append({"name": name, **values})
        shown = "  ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in values.items()
        )
        print(f"{name:<34} {shown}", flush=True)

    def title(self, text: str) -> None:
        print(f"\n{text} (after {time.perf_counter() - self.began:.0f} s)", flush=True)

    def close_to(self, name: str, exact: Tensor, plain: Tensor, fused: Tensor) -> None:
        """Compares relative distances from float32. Except for noise, that of the fused pass must not be larger."""
        distances = [relative_error(value, exact) for value in (plain, fused)]
        self.note(name, plain=distances[0], fused=distances[1])
        if not distances[1] <= max(1.3 * distances[0], 1e-4):
            self.wrong.append(name)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.float() - exact).norm() / exact.norm())


def seconds(body: Callable[[], object], repeats: int) -> float:
    """Returns the median. On a GPU, events measure it, and a call is launched while the previous one runs."""
    body()
    if not ON_GPU:
        began = time.perf_counter()
        body()
        return time.perf_counter() - began
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        body()
        mark.record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))) / 1e3


def graph_seconds(body: Callable[[], object], repeats: int) -> float:
    """Returns the same from a captured graph, which excludes the cost of launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return seconds(graph.replay, repeats)


def parts_of(body: Callable[[], object]) -> dict[str, float]:
    """Returns milliseconds of kernels by part."""
    body()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        body()
        torch.cuda.synchronize()
    times = dict.fromkeys([*PARTS, "other"], 0.0)
    for event in profile.key_averages():
        name = event.key.lower()
        part = next((p for p, words in PARTS.items() if any(w in name for w in words)), "other")
        times[part] += event.self_device_time_total / 1e3
    return {part: round(value, 3) for part, value in times.items() if value}


def tower_flops(config: VisionConfig, crops: int) -> float:
    patches, dim = config.grid**2, config.enc_dim
    weights = config.enc_n_layers * (4 * dim**2 + 2 * dim * config.enc_ff_dim)
    weights += config.in_channels * config.enc_patch_size**2 * dim
    return 2.0 * crops * patches * (weights + config.enc_n_layers * 2 * patches * dim)


def prefix_flops(config: TextConfig, images: int, length: int) -> float:
    weights = 4 * config.dim**2 + 2 * config.dim * config.ff_dim
    return 2.0 * images * length * config.n_layers * (weights + 2 * length * config.dim)


def random_crops(config: VisionConfig, count: int) -> Tensor:
    shape = count, config.crop_size, config.crop_size, config.in_channels
    # Smooth as images are, more than noise is.
    small = torch.rand(count, 3, 9, 9, device=DEVICE)
    smooth = F.interpolate(small, size=shape[1:3], mode="bilinear").permute(0, 2, 3, 1)
    return (smooth * 255).to(torch.uint8).contiguous()


def check_tower(bench: Bench, plain: VisionModel, fused: FusedVision, exact: VisionModel) -> None:
    config = plain.config
    crops = random_crops(config, 7)
    wanted, features = exact.encode_crops(crops), fused.encode_crops(crops)
    bench.close_to("features of 7 crops", wanted, plain.encode_crops(crops), features)
    tiling = (2, 3)
    embedded = exact.embed(wanted, tiling)
    [both] = fused.embed_many([(features, tiling)])
    bench.close_to("embedding, 2 x 3 tiles", embedded, plain.embed(features, tiling), both)


def plans(bench: Bench, fused: FusedVision) -> None:
    """Measures how much longer the first pass of each batch size takes than the second: it compiles kernels and plans
    attention."""
    for count in (1, 2, 3, 9, 28, 56):
        crops = random_crops(fused.config, count)
        torch.cuda.synchronize()
        times = []
        for _ in range(2):
            began = time.perf_counter()
            fused.encode_crops(crops)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        bench.note(f"first pass of {count} crops", ms=times[0], second=times[1])


def time_tower(
    bench: Bench, plain: VisionModel, fused: FusedVision, counts: tuple[int, ...], repeats: int
) -> None:
    for count in counts:
        crops = random_crops(plain.config, count)
        flops = tower_flops(plain.config, count) / 1e12
        bodies = {"eager": plain.encode_crops, "fused": fused.encode_crops}
        for name, encode in bodies.items():
            taken = seconds(partial(encode, crops), repeats)
            bench.note(f"{name}, {count} crops", ms=taken * 1e3, tflops=flops / taken)
        if ON_GPU and count <= 9:
            taken = graph_seconds(partial(fused.encode_crops, crops), repeats)
            bench.note(f"fused in a graph, {count} crops", ms=taken * 1e3, tflops=flops / taken)
        if ON_GPU and count in (9, 56):
            for name, encode in bodies.items():
                bench.note(f"  {name} by part, ms", **parts_of(partial(encode, crops)))


def time_variants(bench: Bench, fused: FusedVision, tensors: dict[str, Tensor], count: int) -> None:
    """Times one layer's GEMMs in all forms, and attention by each kernel, in microseconds."""
    config = fused.config
    rows, dim = count * config.grid**2, config.enc_dim
    x, u = (torch.randn(rows, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
    block = fused.blocks[0]
    fc1, qkv = block.fc1, block.qkv
    hidden = linear_gelu(u, fc1)
    proj_bias = tensors["vision.blocks.0.attn.proj.bias"]
    fc2_bias = tensors["vision.blocks.0.mlp.fc2.bias"]
    forms: dict[str, Callable[[], object]] = {
        "qkv": lambda: linear(u, qkv),
        "fc1, GELU in the epilogue": lambda: linear_gelu(u, fc1),
        "fc1 then GELU": lambda: F.gelu(linear(u, fc1), approximate="tanh"),
        "proj added by the GEMM": lambda: add_linear(x, u, block.proj),
        "proj, then added": lambda: x.add_(F.linear(u, block.proj, proj_bias)),
        "fc2 added by the GEMM": lambda: add_linear(x, hidden, block.fc2),
        "fc2, then added": lambda: x.add_(F.linear(hidden, block.fc2, fc2_bias)),
    }
    for name, body in forms.items():
        bench.note(f"{name}, {count} crops", us=seconds(body, 20) * 1e6)
    packed = linear(u, qkv).view(count, -1, 3, config.enc_n_heads, dim // config.enc_n_heads)
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ):
        try:
            with sdpa_kernel(backend):
                taken = seconds(lambda: fused.attention(packed), 20)
        except RuntimeError as error:
            print(f"{backend.name}: {error}")
            continue
        bench.note(f"{backend.name.lower()}, {count} crops", us=taken * 1e6)


def embed_each(plain: VisionModel, images: list[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
    return [plain.embed(features, tiling) for features, tiling in images]


def time_embedding(bench: Bench, plain: VisionModel, fused: FusedVision, repeats: int) -> None:
    patches, dim = plain.config.grid**2, plain.config.enc_dim
    tiling = (2, 3)
    features = torch.randn(7, patches, dim, device=DEVICE, dtype=DTYPE)
    for count in (1, 4, 16) if ON_GPU else (1,):
        images = [(features, tiling)] * count
        eager = seconds(partial(embed_each, plain, images), repeats)
        ours = seconds(partial(fused.embed_many, images), repeats)
        bench.note(f"{count} images embedded, ms", eager=eager * 1e3, fused=ours * 1e3)


@dataclass
class Prefixes:
    """A prefill pass of BOS and image of several sequences: blocks that attend in both directions."""

    count: int
    length: int
    heads: int
    x: Tensor
    positions: Tensor
    slots: Tensor
    pools: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, config: ModelConfig, count: int) -> Prefixes:
        text, length = config.text, config.image_prefix
        total = count * length
        shape = text.n_layers, total, text.n_heads, text.head_dim
        return cls(
            count,
            length,
            text.n_heads,
            torch.randn(total, text.dim, device=DEVICE, dtype=DTYPE),
            torch.arange(length, device=DEVICE).repeat(count),
            torch.arange(total, device=DEVICE),
            (
                torch.zeros(shape, device=DEVICE, dtype=DTYPE),
                torch.zeros(shape, device=DEVICE, dtype=DTYPE),
            ),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        blocks = (p.unflatten(0, (self.count, self.length)).transpose(1, 2) for p in (q, k, v))
        attended = F.scaled_dot_product_attention(*blocks)
        out.view(self.count, self.length, self.heads, -1).copy_(attended.transpose(1, 2))

    def plain(self, model: Moondream, pools: tuple[Tensor, Tensor]) -> Tensor:
        spans = [
            Span(place, fresh=place)
            for i in range(self.count)
            for place in [slice(i * self.length, (i + 1) * self.length)]
        ]
        attention = PagedAttention(*pools, self.slots, spans, [])
        x = self.x.to(model.dtype)
        return model.text(x, self.positions, attention)

    def fused(self, text: FusedText) -> Tensor:
        return text.prefill(self.x.clone(), self.positions, self.slots, self.attend, *self.pools)


def time_prefixes(
    bench: Bench, model: Moondream, exact: Moondream, text: FusedText, repeats: int, quick: bool
) -> None:
    one = Prefixes.of(model.config, 1)
    pools = tuple(pool.float() for pool in one.pools)
    wanted = one.plain(exact, (pools[0], pools[1]))
    bench.close_to("prefix of 1 image", wanted, one.plain(model, one.pools), one.fused(text))
    for count in ((16,) if quick else (1, 4, 16)) if ON_GPU else (2,):
        prefixes = Prefixes.of(model.config, count)
        flops = prefix_flops(model.config.text, count, prefixes.length) / 1e12
        bodies: dict[str, Callable[[], object]] = {
            "eager": partial(prefixes.plain, model, prefixes.pools),
            "fused": partial(prefixes.fused, text),
        }
        for name, body in bodies.items():
            taken = seconds(body, repeats)
            bench.note(f"{name}, {count} prefixes", ms=taken * 1e3, tflops=flops / taken)
            if ON_GPU and count in (1, 16):
                bench.note(f"  {name} by part, ms", **parts_of(body))


def model_config(dry_run: bool) -> ModelConfig:
    if not dry_run:
        return parse_model_config({}, family="moondream2")
    text = {"dim": 64, "ff_dim": 96, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 99}
    vision = {"enc_dim": 48, "enc_n_layers": 2, "enc_ff_dim": 64, "enc_n_heads": 2}
    vision |= {"crop_size": 126, "overlap_margin": 2, "proj_inner_dim": 48, "proj_out_dim": 64}
    numbers = {"text": text, "vision": vision, "region": {"dim": 64, "inner_dim": 32}}
    return parse_model_config({"config": numbers}, family="moondream2")


def widened(config: ModelConfig, tensors: dict[str, Tensor]) -> Moondream:
    return Moondream(config, {name: tensor.float() for name, tensor in tensors.items()})


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="9 and 56 crops, 16 images, no variants"
    )
    parser.add_argument("--json", type=Path, help="write every figure to this path")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, also without a GPU")
    args = parser.parse_args()
    if not (ON_GPU or args.dry_run):
        sys.exit("no GPU: only --dry-run")
    torch.manual_seed(0)
    bench = Bench()
    config = model_config(args.dry_run)
    repeats = 3 if args.quick else 7
    tensors = pack_weights(config, random_checkpoint(config, 0, DTYPE, DEVICE).tensors)
    model, exact = Moondream(config, tensors), widened(config, tensors)
    fused = FusedVision(config.vision, tensors)
    bench.title(f"Distance from float32, {DTYPE}; attention by {fused.attention.backend}")
    check_tower(bench, model.vision, fused, exact.vision)
    if ON_GPU:
        bench.title("First passes")
        plans(bench, fused)
    bench.title("Vision tower")
    counts = (9, 56) if args.quick else (1, 9, 18, 28, 56)
    time_tower(bench, model.vision, fused, (1, 2) if args.dry_run else counts, repeats)
    time_embedding(bench, model.vision, fused, repeats)
    if ON_GPU and not args.quick:
        for count in (9, 56):
            bench.title(f"One layer's forms, {count} crops")
            time_variants(bench, fused, tensors, count)
    bench.title("Prefix prefill")
    text = FusedText(config.text, tensors, max_rows=1, page_size=1)
    time_prefixes(bench, model, exact, text, repeats, args.quick or args.dry_run)
    print(f"\n{time.perf_counter() - bench.began:.0f} s in all")
    if args.json:
        args.json.write_text(json.dumps(bench.figures, indent=1))
    if bench.wrong:
        sys.exit(f"farther from float32 than the plain passes: {', '.join(bench.wrong)}")


if __name__ == "__main__":
    main()
