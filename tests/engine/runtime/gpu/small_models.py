"""Random models of both families for interpreted kernels: a crop has 16 patches, an image 17 positions."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.preprocess.crops import cut_crops
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.runtime.gpu.parts import Options
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.model_config import ModelConfig, parse_model_config
from kestrel_engine.types.requests import PreparedImage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAW = {
    "text": {"dim": 64, "ff_dim": 96, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 150,
             "max_context": 256, "rotary_dim": 16},
    "vision": {"enc_dim": 48, "enc_n_layers": 1, "enc_ff_dim": 80, "enc_n_heads": 2, "proj_out_dim": 64,
               "crop_size": 56, "max_crops": 6, "overlap_margin": 1, "proj_inner_dim": 96},
    "region": {"dim": 64, "coord_feat_dim": 16, "coord_out_dim": 64, "size_feat_dim": 32,
               "size_out_dim": 128, "inner_dim": 96},
}  # fmt: skip
MOE = {"num_experts": 6, "start_layer": 1, "experts_per_token": 2, "expert_inner_dim": 32}


def small_model(
    family: str, *, seed: int = 0, heads: int = 2, head_dim: int = 32
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """``family``: "moondream2" or "moondream3"."""
    raw = {key: dict(value) for key, value in RAW.items()}
    dim = heads * head_dim
    raw["text"] |= {"dim": dim, "n_heads": heads, "n_kv_heads": heads}
    raw["vision"]["proj_out_dim"] = raw["region"]["dim"] = dim
    if family == "moondream3":
        raw["text"] |= {"tau_attn": True, "moe": MOE}
    config = parse_model_config({"config": raw}, family=family)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            tensors[name] = noise * 0.1
        elif ".ln" in name or "post_ln" in name:
            tensors[name] = 1 + noise * 0.1
        else:
            tensors[name] = noise / shape[-1] ** 0.5
    # Otherwise every token looks alike to the blocks, and greedy answers are one id for ever.
    tensors["text.wte"] *= config.text.dim**0.5
    return config, tensors


def torch_runtime(config: ModelConfig, tensors: dict[str, Tensor], **options: Any) -> TorchRuntime:
    model = Moondream(config, tensors)
    return TorchRuntime(model, config, device="cpu", dtype=torch.float32, **options)


def gpu_runtime(config: ModelConfig, tensors: dict[str, Tensor], **options: Any) -> GpuRuntime:
    """On a GPU if there is one."""
    own = {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}
    return GpuRuntime(config, own, Options(**options))


def picture(key: str, tiling: tuple[int, int], config: ModelConfig, *, seed: int) -> PreparedImage:
    side = config.vision.crop_size
    count = 1 + tiling[0] * tiling[1]
    crops = np.random.default_rng(seed).integers(0, 255, (count, side, side, 3), dtype=np.uint8)
    if tiling == (1, 1):
        crops[1] = crops[0]
    return PreparedImage(key, crops, tiling, width=100, height=100)


def both_ways(
    key: str, width: int, height: int, config: ModelConfig, *, seed: int
) -> tuple[PreparedImage, PreparedImage]:
    """One image of noise with its crops, and with its pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    image = DecodedImage(pixels)
    prepared = [cut_crops(image, config.vision, device_pixels=n) for n in (0, width * height)]
    with_crops, with_pixels = (replace(each, key=key) for each in prepared)
    assert with_crops.pixels is None and with_pixels.crops is None
    return with_crops, with_pixels
