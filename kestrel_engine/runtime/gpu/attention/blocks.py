"""BlockAttention: attention within the image blocks of a prefill pass, by our own kernel or by torch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .flashinfer_paged import DTYPES
from .patches import own_kernel, works


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """``own``: take our own kernel for the shapes that it supports. ``backend``: torch's backend for the others; None
    leaves the choice to torch."""

    own: bool = False
    backend: SDPBackend | None = None

    @classmethod
    def choose(
        cls, device: torch.device, dtype: torch.dtype, *, own: bool = True
    ) -> BlockAttention:
        """Returns the fastest for ``device``; without ``own``, the fastest of torch. Of torch's backends, that is cuDNN
        if it supports ``dtype``.

        FlashInfer's fa3 took 6 to 24 % less time on an H100, by the number of blocks, but nvcc compiles it for 81 s.
        """
        if device.type != "cuda" or dtype not in DTYPES:
            return cls()
        probe = torch.zeros(1, 8, 3, 1, 64, dtype=dtype, device=device)
        cudnn = works(SDPBackend.CUDNN_ATTENTION, probe)
        return cls(own, SDPBackend.CUDNN_ATTENTION if cudnn else None)

    def __call__(
        self, blocks: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> None:
        """Writes the attention output within each block to ``out`` [number * length, H*D], with any row stride.

        ``blocks``: the number and the length of the blocks. ``q``, ``k``, ``v``: [number * length, H, D], any row
        stride.
        """
        q, k, v = (x.unflatten(0, blocks) for x in (q, k, v))
        into = out.unflatten(0, blocks).unflatten(2, q.shape[2:])
        kernel = own_kernel(blocks[1], q.shape[-1], q.dtype, q.device) if self.own else None
        if kernel is not None:
            kernel(q, k, v, into)
            return
        # Views [n, H, length, D]. The kernels accept any stride but for the last dimension.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with (
            nullcontext()
            if self.backend is None
            else sdpa_kernel([self.backend, SDPBackend.MATH], set_priority=True)
        ):
            attended = F.scaled_dot_product_attention(q, k, v)
        into.copy_(attended.transpose(1, 2))
