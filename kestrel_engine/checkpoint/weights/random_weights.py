"""Generates random weights on the device: a model of the true shape without any file, for benchmarks and experiments.

The distributions keep activations similar to those of a trained model: matrices preserve the scale of their input,
branches into the residual stream are damped by depth, norm weights are near one, biases are small, and different tokens
choose different experts. Each tensor has its own generator, seeded with the tensor's name, so the values depend only on
the seed, the device and the dtype.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch

from ...models.weight_only import scale_of
from ...types.model_config import ModelConfig
from ...types.progress import Progress
from ..progress import log_progress
from .expected import expected_tensors
from .fp8 import dequantise, quantise_rows
from .loader import LoadedCheckpoint
from .memory import require_memory
from .rounding import form_of, rounded, rounded_bytes

ROUTER_SPREAD = 1.5
"""Standard deviation of router logits. With it, the eight chosen of 64 experts have weights of about 0.05 to 0.4."""
BIAS_STD = 0.02
NORM_STD = 0.1
TABLE_STD = {
    "text.wte": 1.0,
    "vision.pos_emb": 1.0,
    "region.coord_features": 1.0,
    "region.size_features": 1.0,
}
"""Standard deviations of tables that are looked up or added. They match the scale of the residual stream."""
ALPHA_STD = 0.5
"""Standard deviation of tau attention's weight of the position."""

_EXPERTS_AT_ONCE = 8
"""Experts that are generated at once on a GPU. Their float32 values take 134 MB for the released shape."""


def random_checkpoint(
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    keep_fp8: bool = False,
    narrow: str = "wide",
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Generates all tensors of ``config``. Experts are rounded to FP8 with a scale for each row, and with ``keep_fp8``
    stay so. ``narrow``: as in `rounding`. Raises InsufficientMemoryError."""
    device = torch.device(device)
    shapes = expected_tensors(config)
    report = progress or log_progress("generating weights")
    total = weight_bytes(config, dtype, keep_fp8=keep_fp8, narrow=narrow, device=device)
    require_memory(total, device, what=f"random weights as {str(dtype).removeprefix('torch.')}")
    tensors: dict[str, torch.Tensor] = {}
    done = 0

    def make(name: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator(device).manual_seed(_seed_of(seed, name))
        form = form_of(name, shapes[name], narrow, device)
        if is_expert(config, name):
            weight, scale = _experts(config, name, shapes[name], device, generator)
            if keep_fp8 and form is None:
                return {name: weight, scale_of(name): scale}
            values = dequantise(weight, scale, dtype, device)
            return {name: values} if form is None else rounded(name, values, form)
        mean, std = moments(config, name, shapes[name])
        values = torch.empty(shapes[name], dtype=dtype, device=device)
        values.normal_(mean, std, generator=generator)
        return {name: values} if form is None else rounded(name, values, form)

    for made in _each(make, list(shapes), device):
        tensors |= made
        done += sum(tensor.nbytes for tensor in made.values())
        report(done, total, next(iter(made)))
    kind = str(dtype).removeprefix("torch.")
    return LoadedCheckpoint(config, tensors, f"random:{seed}:{device.type}:{kind}", (), ())


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    keep_fp8: bool,
    narrow: str = "wide",
    device: torch.device | None = None,
) -> int:
    """Returns the bytes of all weights of a model. Arguments as of `random_checkpoint`."""
    total = 0
    for name, shape in expected_tensors(config).items():
        form = form_of(name, shape, narrow, device or torch.device("cpu"))
        if form is not None:
            total += rounded_bytes(shape, form)
            continue
        eight_bit = keep_fp8 and is_expert(config, name)
        total += prod(shape) + 4 * prod(shape[:-1]) if eight_bit else prod(shape) * dtype.itemsize
    return total


def moments(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name in TABLE_STD:
        return 0.0, TABLE_STD[name]
    if name.endswith(".bias"):
        return 0.0, BIAS_STD
    if name.endswith(".alpha"):
        return 0.0, ALPHA_STD
    if len(shape) == 1:
        return 1.0, NORM_STD
    std: float = shape[-1] ** -0.5
    if name.endswith(".router.weight"):
        return 0.0, ROUTER_SPREAD * std
    if ".blocks." in name and name.endswith((".attn.proj.weight", ".mlp.fc2.weight")):
        vision = name.startswith("vision.")
        layers = config.vision.enc_n_layers if vision else config.text.n_layers
        return 0.0, std * (2 * layers) ** -0.5
    return 0.0, std


def is_expert(config: ModelConfig, name: str) -> bool:
    moe = config.text.moe
    if moe is None or not name.endswith((".mlp.fc1.weight", ".mlp.fc2.weight")):
        return False
    return name.startswith("text.blocks.") and int(name.split(".")[2]) >= moe.start_layer


def _experts(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generates expert weights: [experts, rows, columns] float8_e4m3fn and their scales [experts, rows] float32."""
    weight = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.empty(shape[:-1], dtype=torch.float32, device=device)
    mean, std = moments(config, name, shape)
    step = _EXPERTS_AT_ONCE if device.type != "cpu" else 1
    for first in range(0, shape[0], step):
        some = slice(first, min(first + step, shape[0]))
        wide = torch.empty(weight[some].shape, dtype=torch.float32, device=device)
        weight[some], scale[some] = quantise_rows(wide.normal_(mean, std, generator=generator))
    return weight, scale


def _each(
    make: Callable[[str], dict[str, torch.Tensor]], names: list[str], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the result of ``make`` for each name. On a CPU, one thread makes each tensor, because a torch generator
    uses a single thread."""
    if device.type != "cpu":
        yield from map(make, names)
        return
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="kestrel-random") as threads:
        yield from threads.map(make, names)


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")
