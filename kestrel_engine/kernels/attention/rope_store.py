"""The step between the qkv GEMM and attention in prefill, in one launch: tau factors, RoPE, storing keys and values.

A program handles one token. The arithmetic is float32, with one rounding at the end, also to FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..e4m3 import as_bytes, stored


def _config(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns the heads and the warps of a program, for about 32 KB of q, k and v in flight."""
    heads = max(1, 4096 // (triton.next_power_of_2(head_dim) * dtype.itemsize))
    return triton.next_power_of_2(heads), 4


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    tau: tuple[Tensor, Tensor] | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Rotates q and k of ``qkv`` [T, >= 3*H*D] in place, and stores k and v at ``slots``.

    ``tau``: raw content [T, 2*H] and alpha [H], both float32, or None. With tau, q and v are first multiplied by their
    factors in place. ``positions``, ``slots``: [T] int64; no slot may occur twice. ``key_pool``, ``value_pool``:
    [num_slots, H, D] of one layer, contiguous; in FP8, they store k and v divided by ``scales``. ``cos``, ``sin``:
    [max_positions, rotary_dim / 2] float32. ``qkv`` and content may have any row stride, but contiguous columns.
    """
    tokens = qkv.shape[0]
    _, num_heads, head_dim = key_pool.shape
    rotary = 2 * cos.shape[-1]
    assert qkv.stride(1) == 1 and qkv.shape[1] >= 3 * num_heads * head_dim
    assert key_pool.is_contiguous() and value_pool.shape == key_pool.shape
    assert value_pool.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    assert len(positions) == len(slots) == tokens and rotary <= head_dim
    if not tokens:
        return
    heads, num_warps = _config(head_dim, qkv.dtype)
    heads = min(heads, triton.next_power_of_2(num_heads))
    content, alpha = tau if tau is not None else (qkv, cos)
    assert content.stride(1) == 1
    _rope_store[(tokens, triton.cdiv(num_heads, heads))](
        qkv,
        positions,
        slots,
        as_bytes(key_pool),
        as_bytes(value_pool),
        cos,
        sin,
        content,
        alpha,
        qkv.stride(0),
        content.stride(0),
        1.0 / scales[0],
        1.0 / scales[1],
        H=num_heads,
        D=head_dim,
        BD=triton.next_power_of_2(head_dim),
        HALF=rotary // 2,
        BHALF=triton.next_power_of_2(rotary // 2),
        BREST=triton.next_power_of_2(max(1, head_dim - rotary)),
        HEADS=heads,
        TAU=tau is not None,
        num_warps=num_warps,
    )


@triton.jit
def _factor(content, heads, known, place):
    """Returns tanh(content) + 0.5 + place, [HEADS, 1] float32, with tanh(x) = 2 * sigmoid(2x) - 1."""
    raw = tl.load(content + heads, mask=known, other=0.0).to(tl.float32)
    return (2.0 * tl.sigmoid(2.0 * raw) - 0.5 + place)[:, None]


@triton.jit
def _rope_store(
    qkv, positions, slots, key_pool, value_pool, cos, sin, content, alpha, qkv_stride, content_stride,
    per_key, per_value,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, BHALF: tl.constexpr, BREST: tl.constexpr,
    HEADS: tl.constexpr, TAU: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    slot = tl.load(slots + token)
    q = qkv + token * qkv_stride
    k = q + H * D
    v = k + H * D
    keys = key_pool + slot * (H * D)
    values = value_pool + slot * (H * D)

    heads = group * HEADS + tl.arange(0, HEADS)
    known = heads < H
    # One thread holds both halves of a pair, so no thread reads a value that another thread has already rotated.
    j = tl.arange(0, BHALF)
    turns = known[:, None] & (j < HALF)[None, :]
    low = heads[:, None] * D + j[None, :]
    high = low + HALF
    cosine = tl.load(cos + position * HALF + j, mask=j < HALF, other=1.0)[None, :]
    sine = tl.load(sin + position * HALF + j, mask=j < HALF, other=0.0)[None, :]
    k_low = tl.load(k + low, mask=turns, other=0.0).to(tl.float32)
    k_high = tl.load(k + high, mask=turns, other=0.0).to(tl.float32)
    q_low = tl.load(q + low, mask=turns, other=0.0).to(tl.float32)
    q_high = tl.load(q + high, mask=turns, other=0.0).to(tl.float32)
    d = tl.arange(0, BD)
    hd = heads[:, None] * D + d[None, :]
    known_hd = known[:, None] & (d < D)[None, :]
    new_v = tl.load(v + hd, mask=known_hd, other=0.0).to(tl.float32)
    if TAU:
        raw = content + token * content_stride
        turn = tl.load(alpha + heads, mask=known, other=0.0)
        place = tl.sigmoid(turn * tl.log(position.to(tl.float32) + 1.0))
        of_q = _factor(raw, heads, known, place)
        q_low *= of_q
        q_high *= of_q
        new_v *= _factor(raw + H, heads, known, place)
        tl.store(v + hd, new_v.to(qkv.dtype.element_ty), mask=known_hd)
    tl.store(values + hd, stored(new_v, value_pool, per_value), mask=known_hd)

    new_low = k_low * cosine - k_high * sine
    new_high = k_low * sine + k_high * cosine
    tl.store(k + low, new_low.to(qkv.dtype.element_ty), mask=turns)
    tl.store(k + high, new_high.to(qkv.dtype.element_ty), mask=turns)
    tl.store(keys + low, stored(new_low, key_pool, per_key), mask=turns)
    tl.store(keys + high, stored(new_high, key_pool, per_key), mask=turns)
    tl.store(q + low, (q_low * cosine - q_high * sine).to(qkv.dtype.element_ty), mask=turns)
    tl.store(q + high, (q_low * sine + q_high * cosine).to(qkv.dtype.element_ty), mask=turns)
    if 2 * HALF < D:
        i = 2 * HALF + tl.arange(0, BREST)
        rest = heads[:, None] * D + i[None, :]
        stays = known[:, None] & (i < D)[None, :]
        kept = tl.load(k + rest, mask=stays, other=0.0).to(tl.float32)
        tl.store(keys + rest, stored(kept, key_pool, per_key), mask=stays)
        if TAU:
            scaled = tl.load(q + rest, mask=stays, other=0.0).to(tl.float32) * of_q
            tl.store(q + rest, scaled.to(qkv.dtype.element_ty), mask=stays)
