"""A fingerprint of weights: equal for equal weights in any file format, and cheap to compute for 20 GB.

The fingerprint is a SHA-256 over canonical names, shapes, stored dtypes and *sampled* bytes: all bytes of tensors up to
64 KiB, and of larger tensors 32 evenly spaced samples of 2 KiB, including the first and the last bytes. It
distinguishes models, training states and dtypes. It does not detect a deliberate change between the samples.
"""

from __future__ import annotations

import hashlib

import torch

WHOLE_BYTES = 64 * 1024
SAMPLES = 32
SAMPLE_BYTES = 2048


class Fingerprint:
    """Collects tensors. The result does not depend on their order."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor as stored, before conversion, under its canonical name. It may be on any device.

        At most WHOLE_BYTES of its data are read.
        """
        digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.contiguous().view(-1).view(torch.uint8)
        size = data.nbytes
        if size > WHOLE_BYTES:
            starts = ((size - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES))
            data = torch.cat([data[start : start + SAMPLE_BYTES] for start in starts])
        digest.update(data.cpu().numpy().tobytes())
        self._digests[name] = digest.digest()

    def hexdigest(self) -> str:
        """Returns the fingerprint as 64 hexadecimal digits."""
        total = hashlib.sha256()
        for name in sorted(self._digests):
            total.update(self._digests[name])
        return total.hexdigest()
