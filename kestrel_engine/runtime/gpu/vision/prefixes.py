"""ImagePrefixes: the prefixes of images, those used last on the device and others in pinned memory of the host.

All copies are enqueued on the stream of the steps, so a copy back follows the copy to the host, and a place of the host
is written again only after it was read. The host itself never reads one.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ....errors import InsufficientMemoryError
from ..memory import size_text


class ImagePrefixes:
    """At most ``on_device`` prefixes stay on the device, while there is a place for the others on the host: ``on_host``
    places, taken at the start. ``shape``: of a prefix, [positions, dim]. Raises InsufficientMemoryError."""

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        on_device: int,
        on_host: int,
    ) -> None:
        self._most, self._device = on_device, device
        self._there: OrderedDict[str, Tensor] = OrderedDict()
        """Those on the device, the least recently used first."""
        self._away: dict[str, int] = {}
        """The places on the host of the others."""
        self._places = _pinned((on_host, *shape), dtype, device)
        self._free = list(range(on_host))

    def __contains__(self, key: str) -> bool:
        return key in self._there or key in self._away

    def __len__(self) -> int:
        return len(self._there) + len(self._away)

    def add(self, key: str, prefix: Tensor) -> None:
        """Keeps ``prefix``, on the device, until `drop`."""
        self.drop(key)
        self._there[key] = prefix
        self._send_oldest_away()

    def on_device(self, key: str) -> Tensor:
        """Returns a prefix; copies it back first if the host has it. Raises KeyError."""
        if key in self._there:
            self._there.move_to_end(key)
            return self._there[key]
        place = self._away.pop(key)
        found = torch.empty_like(self._places[place], device=self._device)
        found.copy_(self._places[place], non_blocking=True)
        self._free.append(place)
        self._there[key] = found
        self._send_oldest_away()
        return found

    def drop(self, key: str) -> None:
        """An unknown key has no effect."""
        self._there.pop(key, None)
        if (place := self._away.pop(key, None)) is not None:
            self._free.append(place)

    def clear(self) -> None:
        self._there.clear()
        self._free += self._away.values()
        self._away.clear()

    def _send_oldest_away(self) -> None:
        # The newest one is about to be used.
        while len(self._there) > max(1, self._most) and self._free:
            key, prefix = self._there.popitem(last=False)
            place = self._free.pop()
            self._places[place].copy_(prefix, non_blocking=True)
            self._away[key] = place


def _pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda" and shape[0] > 0)
    except RuntimeError as error:
        size = size_text(torch.Size(shape).numel() * dtype.itemsize)
        raise InsufficientMemoryError(
            f"{size} of the host's memory cannot be pinned for embeddings of images ({str(error).splitlines()[0]}); "
            "lower embedding_host_bytes"
        ) from None
