"""Loads a segmentation refiner. The shapes of its tensors give its sizes.

The released file is torch's: a dictionary of tensors under the key ``head``. Safetensors files have the same names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import CheckpointError
from ..models.refiner import Refiner, RefinerConfig, refiner_shapes
from ..types.model_config import VisionConfig
from .files import find_files, read_headers
from .weights.finite import is_finite
from .weights.loader import read_tensors
from .weights.plan import Faults, checkpoint_error


def load_refiner(
    file: Path, vision: VisionConfig, *, dtype: torch.dtype, device: torch.device | str
) -> Refiner:
    """Loads a refiner for the vision tower ``vision``. Raises CheckpointError for a damaged file, wrong names or
    shapes, and values that are not finite."""
    stored = {
        name.replace("._orig_mod", "").removeprefix("_orig_mod."): tensor
        for name, tensor in read_headers(find_files(file)).items()
    }
    try:
        dim = stored["image_proj.weight"].shape[0]
        mlp_dim = stored["transformer_blocks.0.mlp.0.weight"].shape[0]
    except (KeyError, IndexError):
        raise CheckpointError(f"{file}: holds no segmentation refiner") from None
    if dim % 32 or not dim:
        raise CheckpointError(f"{file}: a refiner's width must be a multiple of 32, not {dim}")
    config = RefinerConfig(dim, vision.enc_dim, vision.grid, mlp_dim)
    expected = refiner_shapes(config)
    wrong = [
        name
        for name, shape in expected.items()
        if name in stored and (stored[name].shape != shape or not stored[name].is_float)
    ]
    faults = Faults(
        missing=[name for name in expected if name not in stored],
        unexpected=[name for name in stored if name not in expected],
        misshaped=wrong,
        details={n: f"{n} {list(stored[n].shape)} instead of {list(expected[n])}" for n in wrong},
    )
    if faults:
        raise checkpoint_error(str(file), faults)
    names = list(expected)
    tensors = dict(zip(names, read_tensors((file,), [stored[n] for n in names]), strict=True))
    if nonfinite := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise checkpoint_error(str(file), Faults(nonfinite=nonfinite))
    moved = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    return Refiner(config, moved)
