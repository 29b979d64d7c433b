"""Attention among the patches of each crop: our own kernel on Hopper, elsewhere the fastest of torch's. Both are chosen
once, with the batch sizes for cuDNN."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


PREFERRED = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""The backends of torch by speed, as measured on an H200 with torch 2.11."""

BATCHES: tuple[int, ...] = (*range(1, 11), *range(12, 21, 2), *range(24, 65, 4))
"""The batch sizes for cuDNN. Planning a new shape is slow, so other batch sizes are rounded up to one of these."""


class CropAttention:
    """Unmasked attention of [n, patches, 3, heads, head_dim] (queries, keys, values), n up to the last of `BATCHES`.

    cuDNN keeps its plans by thread, so the thread that encodes must also warm up.
    """

    def __init__(
        self, patches: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._heads, self._head_dim = heads, head_dim
        self._kernel = own_kernel(patches, head_dim, dtype, device)
        self._backends: list[SDPBackend] = []
        if device.type == "cuda" and self._kernel is None:
            probe = torch.zeros(1, 8, 3, heads, head_dim, dtype=dtype, device=device)
            self._backends = [backend for backend in PREFERRED if works(backend, probe)]

    @property
    def backend(self) -> str:
        """The name of the backend, for logs and benchmarks."""
        if self._kernel is not None:
            return "our own"
        return str(self._backends[0].name) if self._backends else "default"

    def padded(self, crops: int) -> int:
        """Returns the number of crops that a buffer for ``crops`` crops must hold. The rest is padding of any value."""
        if not self._backends or self._backends[0] is not SDPBackend.CUDNN_ATTENTION:
            return crops
        return next(size for size in BATCHES if size >= crops)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Selects the backend for calls inside the context. Setting this global state of torch takes longer than a
        call, so one context should hold many calls."""
        if not self._backends:
            yield
            return
        with sdpa_kernel(self._backends, set_priority=True):
            yield

    @property
    def writes_fp8(self) -> bool:
        """Whether calls may ask for FP8."""
        return self._kernel is not None

    def __call__(self, qkv: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the attention output [n, patches, heads * head_dim] of ``qkv`` [n, patches, 3, heads, head_dim].
        ``dtype``: that of the output; None for that of ``qkv``."""
        if self._kernel is not None:
            n, patches = qkv.shape[:2]
            out = qkv.new_empty(n, patches, self._heads, self._head_dim, dtype=dtype)
            q, k, v = qkv.unbind(2)
            self._kernel(q, k, v, out)
            return out.flatten(2)
        assert dtype is None, dtype
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        # The output has the memory layout of the queries, so the result is a view.
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def works(backend: SDPBackend, probe: Tensor) -> bool:
    """Returns whether torch's ``backend`` computes unmasked attention of ``probe`` [n, length, 3, heads, head_dim]."""
    q, k, v = probe.permute(2, 0, 3, 1, 4)
    try:
        with warnings.catch_warnings(), sdpa_kernel(backend):
            # A backend that refuses also warns about the reason.
            warnings.simplefilter("ignore")
            F.scaled_dot_product_attention(q, k, v)
    except RuntimeError:
        return False
    return True
