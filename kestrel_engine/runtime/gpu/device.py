"""The capabilities of a CUDA device. Only this module reads compute capabilities; its callers decide what follows."""

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
"""Ampere, the first generation with bfloat16 tensor cores, asynchronous copies and suitable attention kernels."""
FIRST_FP8 = (8, 9)
"""Ada, the first generation whose tensor cores multiply FP8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The capabilities of one CUDA device. Sizes are in bytes."""

    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    shared_memory_per_block: int
    """The most shared memory that a thread block may use."""
    memory: int

    @property
    def fp8(self) -> bool:
        """Whether its tensor cores multiply float8_e4m3fn."""
        return self.compute_capability >= FIRST_FP8


def capabilities(device: torch.device) -> Capabilities:
    """Returns the capabilities of a CUDA device that torch sees."""
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
            f"is a {found.name} of compute capability {_dotted(found.compute_capability)}; use a "
            f"GPU of at least {_dotted(OLDEST)} (Ampere), or cpu",
        )


@functools.cache
def library_version(name: str) -> str | None:
    """Returns the version of an optional library, "triton" or "flashinfer", or None if it can't be imported.

    It imports the library, which may take seconds, so call it only if the library is about to be used.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            logger.warning("%s is installed but can't be imported: %s", name, error)
        return None
    except Exception as error:  # A broken installation can raise any exception.
        logger.warning("%s is installed but can't be imported: %s", name, error)
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
