"""Checkpoints whose linears of text and region are in 4 bits, as in the releases, written from the specification."""

import json

from safetensors.torch import save_file

from kestrel_engine.checkpoint.weights.int4 import Order

GROUP = 32
"""The releases have groups of 128; these small models have fewer numbers."""


def quantised(weight, group=GROUP):
    """Groups over the whole range of 4 bits: q [..., n / g, g], scales and zero points [..., n / g, 1]."""
    groups = weight.float().reshape(*weight.shape[:-2], -1, group)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    return (groups / scale + zero).round().clamp(0, 15).byte(), scale, zero


def pack(q, order):
    """Written from the specification, not from the loader: two rows of groups become one row of bytes."""
    if order in (Order.HALVES, Order.HALVES_LOW_FIRST):
        first, second = q.chunk(2, dim=-2)
    else:
        first, second = q[..., 0::2, :], q[..., 1::2, :]
    low_first = order in (Order.HALVES_LOW_FIRST, Order.INTERLEAVED_LOW_FIRST)
    return second * 16 + first if low_first else first * 16 + second


def in_four_bits(tensors, order, group=GROUP):
    """A checkpoint's stored tensors, and the values that they mean: linears of text and region, as in the releases."""
    stored, values = {}, {}
    for name, tensor in tensors.items():
        is_linear = name.endswith(".weight") and tensor.ndim > 1 and not name.startswith("vision")
        matrix = tensor.shape[-2:].numel()
        if not is_linear or "lm_head" in name or "router" in name or matrix % (2 * group):
            stored[f"model.{name}"] = values[name] = tensor
            continue
        q, scale, zero = quantised(tensor, group)
        stored[f"model.{name}.packed"] = pack(q, order)
        stored[f"model.{name}.scale"], stored[f"model.{name}.zero_point"] = scale, zero
        values[name] = ((q.float() - zero) * scale).reshape(tensor.shape)
    assert sum(name.endswith(".packed") for name in stored) >= 10
    return stored, values


def write(folder, stored, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    return folder
