"""One error for a device without memory, so that the step thread needs no class of torch's."""

from __future__ import annotations

import torch


def raise_as_memory_error(error: BaseException) -> None:
    """Raises MemoryError if ``error`` is torch's for a device that has no memory left; else does nothing."""
    if isinstance(error, torch.OutOfMemoryError):
        raise MemoryError(str(error)) from error
