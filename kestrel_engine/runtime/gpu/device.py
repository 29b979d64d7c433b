"""What a CUDA device can do, asked once at the start: the only place that looks at compute capabilities.

Knows no model and starts no kernel. What follows from an answer is decided by who asks.
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from importlib import metadata

import torch

from ...errors import ConfigError

logger = logging.getLogger(__name__)

OLDEST = (8, 0)
"""Ampere: the first with bfloat16 in its tensor cores, asynchronous copies, and attention kernels made for it."""
FIRST_FP8 = (8, 9)
"""Ada: the first that multiplies eight-bit floats."""
FA3 = (9, 0)
"""Hopper, and only it: the third generation of attention kernels uses instructions that later cards have no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Of one CUDA device. Sizes are bytes."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block: int
    """The most that one block of threads may ask for."""
    memory: int

    @property
    def fp8(self) -> bool:
        """Whether its tensor cores multiply float8_e4m3fn."""
        return self.compute_capability >= FIRST_FP8

    @property
    def fa3(self) -> bool:
        """Whether FlashInfer's fa3 kernels run; else fa2."""
        return self.compute_capability == FA3


def capabilities(device: torch.device) -> Capabilities:
    """Of a CUDA device that torch sees."""
    properties = torch.cuda.get_device_properties(device)
    return Capabilities(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        num_sms=properties.multi_processor_count,
        shared_memory_per_block=getattr(
            properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
        ),
        memory=properties.total_memory,
    )


def require_supported(device: torch.device) -> None:
    """Raises ConfigError for a CUDA device older than OLDEST. Other devices pass."""
    if device.type != "cuda":
        return
    found = capabilities(device)
    if found.compute_capability < OLDEST:
        raise ConfigError(
            "device",
            str(device),
            f"is a {found.name} of compute capability {_dotted(found.compute_capability)}; "
            f"{_dotted(OLDEST)} (Ampere) is the oldest that works, or cpu",
        )


@functools.cache
def library_version(name: str) -> str | None:
    """The version of an optional library, "triton" or "flashinfer", if it is there and can be imported; else None.

    Imports it, which takes up to seconds: to be asked only when it is about to be used.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            logger.warning("%s is installed and can't be imported: %s", name, error)
        return None
    except Exception as error:  # A broken installation raises whatever its first mistake raises.
        logger.warning("%s is installed and can't be imported: %s", name, error)
        return None
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
