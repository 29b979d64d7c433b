"""Are all weights numbers? Asked where they lie: on a GPU without waiting for each answer.

A NaN or an infinity anywhere makes every answer of the model wrong, and none of its outputs says why.
"""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 1 << 22
_NOT_A_NUMBER = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}
"""Eight-bit floats whose bits without the sign are no less than this are NaN, or infinite."""


class FiniteCheck:
    """Takes tensors one by one and says in the end which were not finite."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._flags: list[torch.Tensor] = []

    def add(self, name: str, *tensors: torch.Tensor) -> None:
        """Tensors of one name: all must be finite."""
        for tensor in tensors:
            if tensor.numel():
                self._names.append(name)
                self._flags.append(all_finite(tensor))

    def nonfinite(self) -> list[str]:
        """Each name once, as they were added. Waits for the device."""
        fine = torch.stack(self._flags).tolist() if self._flags else []
        return list(dict.fromkeys(n for n, ok in zip(self._names, fine, strict=True) if not ok))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity."""
    return tensor.numel() == 0 or bool(all_finite(tensor))


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """The same as a boolean scalar on the tensor's device, not waited for. Reads in chunks, allocates next to nothing
    on the CPU; ``tensor`` must not be empty."""
    flat = tensor.reshape(-1)
    step = _CHUNK_ELEMENTS if tensor.device.type == "cpu" else flat.numel()
    parts = [_chunk(flat[start : start + step]) for start in range(0, flat.numel(), step)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).all()


def _chunk(chunk: torch.Tensor) -> torch.Tensor:
    if chunk.dtype in _NOT_A_NUMBER:
        return (chunk.view(torch.uint8) & 0x7F).max() < _NOT_A_NUMBER[chunk.dtype]
    if chunk.dtype.itemsize == 1:
        chunk = chunk.float()
    # Minimum and maximum carry NaN on, so two numbers tell about the whole chunk.
    return torch.isfinite(torch.stack(torch.aminmax(chunk))).all()
