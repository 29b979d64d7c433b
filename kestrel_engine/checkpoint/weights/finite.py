"""Checks weights for NaN and infinity, on the device that holds them. On a GPU it waits only once, for all tensors.

A single NaN or infinity makes every answer of the model wrong, and no output shows the cause.
"""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 1 << 22
_NOT_A_NUMBER = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""By 8-bit dtype: the smallest bit pattern, without the sign, that is NaN or infinite."""


class FiniteCheck:
    """Collects tensors one by one, then reports the names of those that are not finite."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._flags: list[torch.Tensor] = []

    def add(self, name: str, *tensors: torch.Tensor) -> None:
        """Adds the tensors that belong to ``name``. All floating-point ones must be finite."""
        for tensor in tensors:
            if tensor.numel() and tensor.is_floating_point():
                self._names.append(name)
                self._flags.append(all_finite(tensor))

    def nonfinite(self) -> list[str]:
        """Returns the names of tensors that are not finite, each once, in the order of `add`. Waits for the device."""
        fine = torch.stack(self._flags).tolist() if self._flags else []
        return list(dict.fromkeys(n for n, ok in zip(self._names, fine, strict=True) if not ok))


def is_finite(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor holds neither NaN nor infinity. Waits for the device."""
    return tensor.numel() == 0 or bool(all_finite(tensor))


def is_constant(tensor: torch.Tensor) -> bool:
    """Returns whether a CPU tensor of more than one value holds one value only."""
    if tensor.numel() < 2:
        return False
    flat = tensor.reshape(-1).view(torch.uint8).reshape(tensor.numel(), tensor.element_size())
    return all(bool((flat[:end] == flat[0]).all()) for end in (2**10, len(flat)))


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """As `is_finite`, but returns a bool scalar on the tensor's device without waiting. ``tensor`` must not be empty.
    On a CPU it reads the tensor in chunks, so it allocates little memory."""
    flat = tensor.reshape(-1)
    step = _CHUNK_ELEMENTS if tensor.device.type == "cpu" else flat.numel()
    parts = [_chunk(flat[start : start + step]) for start in range(0, flat.numel(), step)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).all()


def _chunk(chunk: torch.Tensor) -> torch.Tensor:
    if chunk.dtype in _NOT_A_NUMBER:
        return (chunk.view(torch.uint8) & 0x7F).max() < _NOT_A_NUMBER[chunk.dtype]
    if chunk.dtype.itemsize == 1:
        chunk = chunk.float()
    # Minimum and maximum propagate NaN, so two numbers show whether the whole chunk is finite.
    return torch.isfinite(torch.stack(torch.aminmax(chunk))).all()
