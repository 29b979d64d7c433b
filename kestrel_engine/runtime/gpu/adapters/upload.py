"""Upload: copies an adapter from the host to the device, beside the steps that run there.

Copies go in pieces through two pinned buffers, on a stream of their own, so that a step's copies never wait for a whole
adapter. Memory comes from one block that is taken at the start, because the driver may stop all streams while it
allocates.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import Tensor

from ....models.low_rank import LowRank
from ....types.adapter import Adapter
from ..streams import own_stream

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 << 20
"""Takes a PCIe 4 link 0.1 ms."""


class SlabUpload:
    """For one thread. ``reserved_bytes``: of all adapters, to take now; 0 takes memory as adapters come."""

    def __init__(self, device: torch.device, reserved_bytes: int) -> None:
        self._device = device
        self._stream = own_stream(device)
        self._buffers = [
            (torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(2)
        ]
        if reserved_bytes:
            # torch keeps what is freed for later allocations of the same stream.
            try:
                with torch.cuda.stream(self._stream):
                    torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError:  # The KV cache was given more than its share.
                logger.warning(
                    "no %d bytes are left for adapters; some may not fit", reserved_bytes
                )

    def __call__(self, adapter: Adapter) -> Adapter:
        with torch.cuda.stream(self._stream):
            weights = {
                module: LowRank(self._sent(change.a), self._sent(change.b))
                for module, change in adapter.weights.items()
            }
            slabs = {kind: self._sent(tensor) for kind, tensor in adapter.slabs.items()}
        # Steps read the adapter from other streams, so all of it must be there.
        self._stream.synchronize()
        return replace(adapter, weights=weights, slabs=slabs)

    def _sent(self, tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device=self._device)
        source, target = (each.view(-1).view(torch.uint8) for each in (tensor, made))
        for number, begin in enumerate(range(0, len(source), PIECE_BYTES)):
            piece = source[begin : begin + PIECE_BYTES]
            buffer, copied = self._buffers[number % 2]
            copied.synchronize()
            buffer[: len(piece)].copy_(piece)
            target[begin : begin + len(piece)].copy_(buffer[: len(piece)], non_blocking=True)
            copied.record()
        return made
