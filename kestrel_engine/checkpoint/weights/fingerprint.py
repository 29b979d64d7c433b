"""A fingerprint of weights: equal for the same weights however they are stored, cheap for 20 GB.

SHA-256 over canonical names, shapes, stored dtypes and *sampled* bytes: tensors up to 64 KiB whole, larger ones at 32
evenly spaced places of 2 KiB, first and last bytes included. It tells models, training states and dtypes apart; it is
no proof against a deliberate change between the samples.
"""

from __future__ import annotations

import hashlib

import torch

WHOLE_BYTES = 64 * 1024
SAMPLES = 32
SAMPLE_BYTES = 2048


class Fingerprint:
    """Collects tensors in any order; the result does not depend on it."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes a tensor as stored (before conversion, on any device) under its canonical name. At most WHOLE_BYTES of
        it are read, wherever it is."""
        digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.contiguous().view(-1).view(torch.uint8)
        size = data.nbytes
        if size > WHOLE_BYTES:
            starts = ((size - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES))
            data = torch.cat([data[start : start + SAMPLE_BYTES] for start in starts])
        digest.update(data.cpu().numpy().tobytes())
        self._digests[name] = digest.digest()

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        total = hashlib.sha256()
        for name in sorted(self._digests):
            total.update(self._digests[name])
        return total.hexdigest()
