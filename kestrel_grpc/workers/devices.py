"""Which worker computes where, without torch: that is not loaded by who only watches."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ..settings.sources import SettingsError
from ..settings.workers import WorkersConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def worker_devices(config: WorkersConfig, device: str) -> tuple[str, ...]:
    """One for each worker, numbered as this process sees them. ``device``: as --device has it. Raises SettingsError."""
    if config.devices:
        return config.devices
    kind, _, number = device.partition(":")
    if number:
        raise SettingsError(
            f"--device={device}: {config.count} workers need one each; say --device {kind} or name them by --devices"
        )
    if kind == "cpu":
        return ("cpu",) * config.count
    found = count_cuda_devices()
    if kind == "auto" and not found:
        return ("cpu",) * config.count
    if found < config.count:
        raise SettingsError(
            f"--workers={config.count}: each needs a CUDA device of its own, and there are {found} here"
        )
    return tuple(f"cuda:{index}" for index in range(config.count))


def count_cuda_devices() -> int:
    """As the driver says, within CUDA_VISIBLE_DEVICES; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def environment_for(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What lets a process see ``device`` and no other: libraries that ask for the first device get the right one, and
    leave no contexts on others'. Raises SettingsError."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    visible = environ.get(VISIBLE)
    if visible is None:
        return {VISIBLE: number}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise SettingsError(f"{device}: {VISIBLE}={visible!r} lets us see {len(names)} devices")
    return {VISIBLE: names[int(number)]}
