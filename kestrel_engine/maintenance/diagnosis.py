"""Whether a machine can serve a configuration. Loads no model, and sends no request to the hub."""

from __future__ import annotations

from collections.abc import Iterator

from ..config.runtime import RuntimeConfig
from .device import check_confinement, check_device, check_images
from .finding import Finding
from .model import check_fit, check_model, opened_of


def diagnose(config: RuntimeConfig) -> Iterator[Finding]:
    """Checks whether this machine can serve ``config``. Yields one finding for each check."""
    yield from check_device(config)
    yield from check_images()
    yield from check_confinement(config.confine)
    yield from check_model(config)


def check_slow_device(config: RuntimeConfig) -> Iterator[Finding]:
    """Yields the findings of ``diagnose`` about memory and time for a large model on this machine's CPU."""
    opened = opened_of(config)
    if opened is not None:
        found = list(check_fit(config, opened))
        if found[-1].check == "speed":
            yield from (each for each in found if each.check != "choice")
