"""The kernel for unmasked attention of the device, if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ....kernels.gluon_support import hopper_programs

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""See `kernels.attention.unmasked.attend`."""


def own_kernel(
    length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Attend | None:
    """Returns our kernel for blocks of ``length`` positions; None if it does not support the device or the shapes."""
    if not hopper_programs(device):
        return None
    from ....kernels.attention import unmasked

    return unmasked.attend if unmasked.takes(length, head_dim, dtype, device) else None
