"""Whether kernels in Gluon, Triton's lower-level language, can run on a device.

Gluon changes between releases of Triton. So modules with such kernels are imported only if `hopper_programs` is not 0.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton

from .spared import hopper_multiprocessors

logger = logging.getLogger(__name__)

VERSIONS = ((3, 6), (3, 8))
"""The supported Triton versions, [first, second)."""


def hopper_programs(device: torch.device) -> int:
    """Returns one persistent program for each multiprocessor of a Hopper GPU that is not spared; 0 for other devices
    and for a version of Triton that is not supported."""
    programs = hopper_multiprocessors(device)
    return programs if programs and is_supported() else 0


@functools.cache
def is_supported() -> bool:
    first, beyond = VERSIONS
    if first <= tuple(int(part) for part in triton.__version__.split(".")[:2]) < beyond:
        return True
    logger.warning(
        "the kernels for Hopper do not support Triton %s; prefill with experts and the vision tower are slower",
        triton.__version__,
    )
    return False
