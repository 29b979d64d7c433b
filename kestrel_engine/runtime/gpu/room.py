"""Room: multiprocessors that a captured pass leaves to the decode steps beside it.

cuBLAS's GEMMs and our own attention are persistent on Hopper: a kernel over 48 crops holds all multiprocessors for half
a millisecond, and a decode step has a hundred kernels, which would wait for one another. With some multiprocessors
left free, each begins at once. docs/lab/measurements.md (Decoding beside images) has what that gives and costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...kernels.spared import sparing
from .device import capabilities

ROOM = 16
"""Multiprocessors of 132. An H100 encodes 48 crops in 65 ms instead of 61. With 8, the p95 gap between tokens was 15 ms
instead of 11; with 24, the crops take 68 ms."""

LEAST_MULTIPROCESSORS = 100
"""A part of a card (MIG) has fewer. There, `ROOM` would be most of it, or all."""


def can_leave_room(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether passes leave room. Float32 has no such kernels. Other GPUs than Hopper's were not measured. A
    torch without CUDA, which only compiles kernels for a card, has no cuBLAS to set."""
    if device.type != "cuda" or not torch.backends.cuda.is_built() or dtype == torch.float32:
        return False
    card = capabilities(device)
    return (
        card.compute_capability == (9, 0)
        and card.num_sms >= LEAST_MULTIPROCESSORS
        and hasattr(torch._C, "_set_sm_carveout_experimental")
    )


@contextmanager
def leaving_room() -> Iterator[None]:
    """Inside the context, kernels that this thread captures leave `ROOM` multiprocessors free.

    GEMMs of other threads do so, too, because torch has one setting for the process.
    """
    library = torch.backends.cuda.preferred_blas_library()
    # The setting is for cuBLASLt only. By default, torch calls the older interface for products without a bias.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch._C._set_sm_carveout_experimental(ROOM)
    try:
        with sparing(ROOM):
            yield
    finally:
        torch._C._set_sm_carveout_experimental(None)
        torch.backends.cuda.preferred_blas_library(library)
