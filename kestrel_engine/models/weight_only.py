"""Weights in 4 or 8 bits that products read as they are, while activations keep the model's dtype.

Such a weight has a tensor of scales beside it. The weight's dtype and dimensions tell its form. Of a matrix [N, K]:

- float8_e4m3fn [N, K], scales [N] float32: W = weight * scale, as released experts are.
- int8 [N, K], scales [N] bfloat16: W = weight * scale. CPUs only.
- uint8 [N, K / 2], scales [N, K / g, 2]: 4-bit numbers q in groups of g along K, each with a scale and a zero point:
  W = (q - zero) * scale. The high nibbles of g bytes are one group, their low nibbles the next one, so weights can be
  joined along both dimensions. The scales keep the dtype that the file has.
- int8 [N, 1, K], scales [N] bfloat16, and uint8 [N, 1, K / 2], scales [N, K / g, 2] bfloat16: the second and the third
  form in blocks of 16 rows, for the products of `few_rows`: 4 bytes of each row, then the next 4 bytes of each.
- uint8 [N / b, K, b / 2], scales [K / g, N, 2] bfloat16: the same numbers in the order of torch's product for CPUs,
  which depends on the processor. W = (q - 8) * scale + offset.

Experts have one more dimension in front. On a GPU, the kernels of kernels/ read the third form.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiled import few_rows, many_rows
from .compiled.host_code import LANES

FEW_ROWS = 16
"""The most rows for which a CPU's product reads the weight in 4 or 8 bits. With more rows, widening it costs less."""
WIDENED = 1 << 22
"""Numbers of an int8 weight that are widened at a time."""
CPU_ROWS, CPU_GROUPS = 64, (32, 64, 128, 256)
"""torch's product of 4 bits: what the rows of a weight are a multiple of on every processor, and the groups."""
GROUP = 128
"""The group of weights that are rounded to 4 bits here, as in releases."""


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    *,
    keeps_rows: bool = False,
) -> Tensor:
    """Returns ``x @ W.T + bias`` [..., N] in x's dtype, for ``x`` [..., K] and a weight of any form.

    On a CPU, `few_rows` computes the products of few rows if it can. Otherwise a weight in one of the forms for CPUs
    and few rows are multiplied in bfloat16, with sums in float32; a float32 x is rounded for it. `many_rows` computes
    the products of many rows if it can, with int8 and int4 only if ``keeps_rows`` is False. All other products widen
    the weight to x's dtype.
    """
    if scales is None and weight.dtype != torch.bfloat16:
        # Asked first: such a product of a small model takes little longer than the questions below.
        return F.linear(x, weight, bias)
    rows = x.numel() // x.shape[-1]
    if rows <= FEW_ROWS and weight.device.type == "cpu":
        y = _few(x.reshape(rows, -1), weight, scales, bias)
        if y is not None:
            return y.to(x.dtype).view(*x.shape[:-1], -1)
    if rows > FEW_ROWS and not (keeps_rows and scales is not None) and many_rows.takes(x, weight):
        return many_rows.product(x, weight, scales, bias)
    if scales is None:
        return F.linear(x, weight, bias)
    # Sums of unscaled numbers exceed float16.
    in_range = x.dtype != torch.float16
    in_parts = _widens(x.dtype) or few_rows.is_in_blocks(weight)
    if weight.dtype == torch.int8 and rows > FEW_ROWS and in_range and in_parts:
        return _many(x, weight, scales, bias)
    if not _is_of_torch(weight) or (rows > FEW_ROWS and _widens(x.dtype)):
        return F.linear(x, widened(weight, scales, x.dtype), bias)
    narrow = x.reshape(rows, -1).to(torch.bfloat16)
    if weight.dtype == torch.int8:
        y = torch._weight_int8pack_mm(narrow, weight, scales)
    else:
        group = x.shape[-1] // scales.shape[0]
        flat = weight.view(scales.shape[1], -1)
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(narrow, flat, group, scales)
    y = y.to(x.dtype).view(*x.shape[:-1], -1)
    return y if bias is None else y.add_(bias)


def _many(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Returns ``x @ W.T + bias`` [..., N] for an int8 weight, whose numbers are exact in x's dtype. The scales of its
    rows follow the product. Some rows at a time are widened, into memory that stays in the processor's caches."""
    y = x.new_empty(*x.shape[:-1], len(weight))
    scales, step = scales.to(x.dtype), max(1, WIDENED // x.shape[-1] // LANES) * LANES
    for first in range(0, len(weight), step):
        some = slice(first, first + step)
        part = F.linear(x, plain(weight[some]).to(x.dtype))
        if bias is None:
            torch.mul(part, scales[some], out=y[..., some])
        else:
            torch.addcmul(bias[some], part, scales[some], out=y[..., some])
    return y


def _few(x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Returns ``x @ W.T + bias`` [rows, N] in float32 for ``x`` [rows, K], or None if torch's product is to be used."""
    form = None if torch.is_grad_enabled() else few_rows.form_of(weight)
    if form is None or (
        form == "bf16" and (x.dtype != weight.dtype or len(x) > few_rows.MOST_ROWS)
    ):
        return None
    group = few_rows.group_of(form, weight, scales)
    if group is None:
        return None
    if bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()):
        return few_rows.product(form, x, weight, scales, group, bias)
    return few_rows.product(form, x, weight, scales, group).add_(bias)


def _is_of_torch(weight: Tensor) -> bool:
    """Whether torch has a product for the form."""
    return not few_rows.is_in_blocks(weight) and (weight.dtype == torch.int8 or weight.dim() == 3)


def _widens(dtype: torch.dtype) -> bool:
    """Whether many rows are multiplied faster by a widened weight: where torch has a fast product of ``dtype``."""
    return dtype == torch.float32 or torch.cpu._is_avx512_bf16_supported()


def widened(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values [N, K] of a matrix in any of the forms. Each is computed in float32 and rounded once."""
    if few_rows.is_in_blocks(weight):
        is_int4 = weight.dtype == torch.uint8
        weight, scales = plain(weight), plain(scales) if is_int4 else scales
    if weight.dtype != torch.uint8:
        return (weight.float() * scales.float().unsqueeze(-1)).to(dtype)
    if weight.dim() == 2:
        groups = scales.shape[-2]
        pairs = weight.view(len(weight), groups // 2, -1)
        q = torch.stack([pairs >> 4, pairs & 15], dim=2).view(len(weight), groups, -1)
        scale, zero = scales.float().unbind(-1)
        return (q.float() - zero.unsqueeze(-1)).mul_(scale.unsqueeze(-1)).flatten(1).to(dtype)
    blocks, k, half = weight.shape
    low, high = _cpu_order()
    ordered = weight.new_empty(blocks, 2 * half, k)
    ordered[:, low] = (weight & 15).transpose(1, 2)
    ordered[:, high] = (weight >> 4).transpose(1, 2)
    scale, offset = scales.transpose(0, 1).float().unbind(-1)
    q = ordered.view(blocks * 2 * half, len(scales), -1).float()
    return q.sub_(8).mul_(scale.unsqueeze(-1)).add_(offset.unsqueeze(-1)).flatten(1).to(dtype)


class CpuOrder(NamedTuple):
    """The rows of a block that the low and the high nibbles of a column's bytes belong to."""

    low: Tensor
    high: Tensor


@cache
def _cpu_order() -> CpuOrder:
    """Finds the order of numbers in torch's layout, which depends on the processor, by packing the rows' numbers."""
    rows = torch.arange(CPU_ROWS, dtype=torch.int32).unsqueeze(1).repeat(1, 2)
    units, sixteens = (_packed(digit.contiguous()).flatten() for digit in (rows % 16, rows // 16))
    low = (units & 15) + (sixteens & 15) * 16
    high = (units >> 4) + (sixteens >> 4) * 16
    # The second column of a block begins with the rows of the first one.
    half = int((low == low[0]).nonzero()[1])
    return CpuOrder(low[:half].long(), high[:half].long())


def _packed(q: Tensor) -> Tensor:
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
    return packed


def pack_for_cpu(tensors: dict[str, Tensor]) -> None:
    """Gives weights in 4 bits, and the text decoder's in 8 bits, the form of a product for CPUs, one after the other,
    where one can take them: that of `few_rows` or, in 4 bits, that of torch."""
    for name in [name for name in tensors if scale_of(name) in tensors]:
        weight, scales = tensors[name], tensors[scale_of(name)]
        if weight.dtype == torch.uint8:
            narrow = scales.bfloat16()
        elif weight.dtype == torch.int8 and not name.startswith("vision."):
            narrow = scales
        else:
            continue
        if few_rows.fits_in_blocks(weight, narrow):
            tensors[name] = _in_blocks(weight, weight[..., 0].numel()).unsqueeze(-2)
            is_int4 = weight.dtype == torch.uint8
            tensors[scale_of(name)] = (
                _in_blocks(narrow, weight[..., 0].numel()) if is_int4 else narrow
            )
            continue
        if weight.dtype == torch.int8:
            continue
        n, columns = weight.shape[-2:]
        groups = scales.shape[-2]
        if n % CPU_ROWS or 2 * columns // groups not in CPU_GROUPS:
            continue
        half = len(_cpu_order().low)
        out = weight.new_empty(*weight.shape[:-2], n // (2 * half), 2 * columns, half)
        made = scales.new_empty(*scales.shape[:-3], groups, n, 2, dtype=torch.bfloat16)
        matrices = (weight.view(-1, n, columns), scales.view(-1, n, groups, 2))
        places = (out.view(-1, *out.shape[-3:]), made.view(-1, groups, n, 2))
        for own, own_scales, to, to_scales in zip(*matrices, *places, strict=True):
            pairs = own.view(n, groups // 2, -1)
            q = torch.stack([pairs >> 4, pairs & 15], dim=2).view(n, -1)
            to.copy_(_packed(q.int()).view(to.shape))
            scale, zero = own_scales.float().unbind(-1)
            to_scales.copy_(torch.stack([scale, (8 - zero) * scale], -1).transpose(0, 1))
        tensors[name], tensors[scale_of(name)] = out, made


def _in_blocks(numbers: Tensor, rows: int) -> Tensor:
    """Returns ``numbers``, a weight or scales of 4 bytes, in blocks of 16 rows, in the same shape."""
    words = numbers.contiguous().view(torch.int32).view(rows // LANES, LANES, -1)
    return words.transpose(1, 2).contiguous().view(numbers.dtype).view(numbers.shape)


def plain(numbers: Tensor) -> Tensor:
    """Returns a weight [N, 1, K], or its scales [N, groups, 2], from their blocks. A weight loses its second dimension.
    Other weights stay as they are."""
    if numbers.dim() < 3:
        return numbers
    words = numbers.view(torch.int32).view(len(numbers) // LANES, -1, LANES)
    found = words.transpose(1, 2).contiguous().view(numbers.dtype).view(numbers.shape)
    return found.squeeze(1) if few_rows.is_in_blocks(numbers) else found


def scale_of(weight: str) -> str:
    """Returns the canonical name of the scales of a weight that stays in 4 or 8 bits."""
    return weight.removesuffix(".weight") + ".scale"


def to_groups(
    q: Tensor, scale: Tensor, zero: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns a weight of ``shape`` [..., N, K] in the third form, and its scales. ``q``: [..., n / g, g] uint8.
    ``scale``, ``zero``: [..., n / g, 1]. K is a multiple of 2 g."""
    pairs = q.reshape(*shape[:-1], -1, 2, q.shape[-1])
    numbers = (pairs[..., 0, :] << 4 | pairs[..., 1, :]).flatten(-2)
    dtype = scale.dtype if scale.dtype == zero.dtype else torch.float32
    scales = torch.cat([scale.to(dtype), zero.to(dtype)], dim=-1)
    return numbers, scales.view(*shape[:-1], -1, 2)


def round_to_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds ``weight`` [N, K] to 4 bits in groups of `GROUP`, each over its whole range, with scales in bfloat16."""
    groups = weight.float().reshape(-1, GROUP)
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    scale = (high - low).div_(15).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16()
    zero = (-low / scale).round_().clamp_(0, 15)
    q = (groups / scale).add_(zero).round_().clamp_(0, 15).byte()
    return to_groups(q, scale, zero.bfloat16(), tuple(weight.shape))


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds ``weight`` [N, K] to int8, each row over its whole range, with scales in bfloat16."""
    wide = weight.float()
    scale = wide.abs().amax(-1).div_(127).clamp_min_(torch.finfo(torch.bfloat16).tiny).bfloat16()
    return (wide / scale.unsqueeze(-1)).round_().clamp_(-127, 127).to(torch.int8), scale
