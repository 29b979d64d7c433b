"""Attention among the patches of each crop: which kernel of torch does it, chosen once, and in which batch sizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PREFERRED = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""56 crops of 729 patches, 16 heads of 72, one H200: cuDNN 496 us, flash 712 us (torch 2.11)."""

BATCHES: tuple[int, ...] = (
    *range(1, 11),
    12,
    14,
    16,
    18,
    20,
    24,
    28,
    32,
    36,
    40,
    44,
    48,
    52,
    56,
    60,
    64,
)
"""Numbers of crops that cuDNN is asked for: it plans each shape anew, which takes long, so others are rounded up."""


class CropAttention:
    """Unmasked attention of [n, patches, 3, heads, head_dim] (queries, keys, values), n up to the last of `BATCHES`.

    cuDNN keeps its plans per thread: `warm_up` belongs into the thread that encodes.
    """

    def __init__(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._backends: list[SDPBackend] = []
        if device.type == "cuda":
            probe = torch.zeros(1, 8, 3, heads, head_dim, dtype=dtype, device=device)
            self._backends = [backend for backend in PREFERRED if works(backend, probe)]

    @property
    def backend(self) -> str:
        """The one that is used, for logs and benchmarks."""
        return str(self._backends[0].name) if self._backends else "default"

    def padded(self, crops: int) -> int:
        """How many crops a buffer for ``crops`` of them must hold. What the others contain doesn't matter."""
        if not self._backends or self._backends[0] is not SDPBackend.CUDNN_ATTENTION:
            return crops
        return next(size for size in BATCHES if size >= crops)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Calls belong inside: the choice is torch's global state, and setting it costs more than an attention."""
        if not self._backends:
            yield
            return
        with sdpa_kernel(self._backends, set_priority=True):
            yield

    def __call__(self, qkv: Tensor) -> Tensor:
        """[n, patches, 3, heads, head_dim] -> [n, patches, heads * head_dim]."""
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # Its output is laid out like the queries: what follows is a view.
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def works(backend: SDPBackend, probe: Tensor) -> bool:
    """Whether torch's ``backend`` attends, unmasked, to ``probe`` [n, length, 3, heads, head_dim]."""
    q, k, v = probe.permute(2, 0, 3, 1, 4)
    try:
        with warnings.catch_warnings(), sdpa_kernel(backend):
            # A backend that refuses says why by a warning.
            warnings.simplefilter("ignore")
            F.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return False
    return True
