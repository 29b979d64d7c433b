"""Assigns devices to workers. This module does not use torch, which the supervisor does not import."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ..settings.sources import SettingsError
from ..settings.workers import WorkersConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def worker_devices(config: WorkersConfig, device: str) -> tuple[str, ...]:
    """The device of each worker, as this process numbers devices. ``device``: the value of --device. Raises
    SettingsError."""
    if config.devices:
        return config.devices
    kind, _, number = device.partition(":")
    if number:
        raise SettingsError(
            f"--device={device}: {config.count} workers need one device each; set --device {kind}, or name the devices "
            "with --devices"
        )
    if kind == "cpu":
        return ("cpu",) * config.count
    found = count_cuda_devices()
    if kind == "auto" and not found:
        return ("cpu",) * config.count
    if found < config.count:
        raise SettingsError(
            f"--workers={config.count}: each worker needs its own CUDA device; this machine has {found}"
        )
    return tuple(f"cuda:{index}" for index in range(config.count))


def count_cuda_devices() -> int:
    """The number of devices that the driver reports, limited by CUDA_VISIBLE_DEVICES; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def environment_for(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make ``device`` the only visible device of a process. Raises SettingsError.

    Libraries that use the first device then use the right one, and create no contexts on other devices.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    visible = environ.get(VISIBLE)
    if visible is None:
        return {VISIBLE: number}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise SettingsError(f"{device}: {VISIBLE}={visible!r} allows only {len(names)} devices")
    return {VISIBLE: names[int(number)]}
