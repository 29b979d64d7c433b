"""GEMMs of the fused passes with what cuBLAS does in their epilogue: bias, tanh GELU, adding to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.layers import Linear


def require_exact(dtype: torch.dtype) -> None:
    """Float32 means float32: raises AssertionError if torch may multiply float32 matrices in TF32, 10 bits of fraction.

    It doesn't unless the process told it to.
    """
    precision = torch.get_float32_matmul_precision()
    assert dtype != torch.float32 or precision == "highest", f"float32 products are {precision}"


def linear(x: Tensor, layer: Linear, *, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``; x [T, K], weight [N, K] (its row stride may exceed K), bias [N] or None; ``out`` [T, N].

    The form of torch.addmm that puts a one-dimensional bias into cuBLASLt's epilogue.
    """
    if layer.bias is None:
        return torch.mm(x, layer.weight.T, out=out)
    return torch.addmm(layer.bias, x, layer.weight.T, out=out)


def linear_gelu(x: Tensor, layer: Linear) -> Tensor:
    """``gelu_tanh(x @ weight.T + bias)``, shapes as for `linear`, the bias not None.

    On CUDA one kernel: cuBLASLt's GELU is the tanh form, as is torch's where it does without cuBLASLt. On the CPU the
    same call would take the exact GELU.
    """
    assert layer.bias is not None
    if x.is_cuda:
        return torch._addmm_activation(layer.bias, x, layer.weight.T, use_gelu=True)
    return F.gelu(linear(x, layer), approximate="tanh")


def add_linear(stream: Tensor, x: Tensor, weight: Tensor) -> None:
    """``stream += x @ weight.T`` in place, by the GEMM itself (beta = 1)."""
    stream.addmm_(x, weight.T)
