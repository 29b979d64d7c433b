"""Checks that what a configuration names exists. Reads no weights, and sends no request to the hub."""

from __future__ import annotations

from ..building.device import (
    check_device,
    check_fp8_gemms,
    device_of,
    dtype_of,
    keeps_fp8,
    narrow_of,
    uses_kernels,
)
from ..building.files import check_folders
from ..checkpoint.catalog import architecture, random_name, resolve
from ..config.runtime import RuntimeConfig


def check_names(config: RuntimeConfig) -> None:
    """Checks that model, paths, folders and device exist. Imports torch only for CUDA devices. Raises ConfigError."""
    served_name(config)
    check_folders(config)
    if config.device.startswith("cuda"):
        check_device(config)


def check_choices(config: RuntimeConfig) -> None:
    """Checks that the folders exist, and that the device can compute with the chosen precision and kernels. Raises
    ConfigError."""
    check_folders(config)
    device = device_of(config)
    kernels = uses_kernels(config, device)
    check_fp8_gemms(config, device, dtype_of(config), kernels)
    narrow_of(config, device, kernels)
    keeps_fp8(config, device, kernels)


def served_name(config: RuntimeConfig) -> str:
    """The name under which the model of ``config`` will be served. Does not import torch. Raises ConfigError."""
    if config.random_weights:
        return random_name(architecture(config.model, config.model_path)[0])
    return resolve(config.model, config.model_path, config.tokenizer_path).name
