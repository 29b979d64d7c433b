"""WorkersConfig: how many processes serve, where, and how often one may be replaced."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kestrel_engine import ConfigError, SettingGroup, check_settings, setting

from .addresses import parse_address, unix_path

MOST_WORKERS = 64
_MOST_RESTARTS = 1_000_000
INDEX = "{index}"
"""Stands for a worker's index in the pattern of its own address."""
_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
WORKERS = SettingGroup("workers", "server")


def parse_devices(text: str) -> list[str]:
    """Devices, with commas between them. Raises ValueError."""
    named = [part.strip() for part in text.split(",")]
    if not all(_DEVICE.fullmatch(device) for device in named):
        raise ValueError("must be cpu or cuda:N, with commas between them")
    return named


def parse_pattern(text: str) -> str:
    """An address for each worker. Raises ValueError."""
    parse_address(text.replace(INDEX, "0"))
    if (unix_path(text) is not None) != (INDEX in text):
        raise ValueError("must be unix:PATH with {index} in it, or HOST:PORT")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """By default one process serves, without a supervisor. Raises ConfigError."""

    workers: int | None = setting(
        None,
        WORKERS,
        "processes that share the TCP addresses of --listen, each with a model and a device of its own; on Linux",
        kind="whole",
        metavar="N",
        low=1,
        high=MOST_WORKERS,
        shown="as many as --devices, else 1",
    )
    devices: tuple[str, ...] = setting(
        (),
        WORKERS,
        "each worker's device, with commas: cuda:0,cuda:1",
        parse=parse_devices,
        repeated=True,
        metavar="DEVICES",
        shown="cpu, or with --device cuda cuda:0 and so on",
    )
    """Empty: as the engine's ``device`` says."""
    listen: str | None = setting(
        None,
        WORKERS,
        "each worker's own address besides, for probes and administration: "
        "unix:PATH with {index} in it, or HOST:PORT, where worker 1 takes PORT+1",
        flag="--worker-listen",
        parse=parse_pattern,
        metavar="ADDRESS",
        shown="none",
    )
    restarts: int = setting(
        5,
        WORKERS,
        "how often a worker that ended may be started again within 10 minutes; after that the server ends",
        kind="whole",
        flag="--worker-restarts",
        metavar="N",
        low=0,
        high=_MOST_RESTARTS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for device in self.devices:
            if device != "cpu" and self.devices.count(device) > 1:
                limit = f"{device} is named twice; one process keeps a GPU busy"
                raise ConfigError("devices", ",".join(self.devices), limit)
        if self.devices and len(self.devices) != self.count:
            limit = f"must be the number of devices, and --devices names {len(self.devices)}"
            raise ConfigError("workers", self.count, limit)
        if self.listen is not None:
            try:
                parse_address(address_of(self.listen, self.count - 1))
            except ValueError as error:
                raise ConfigError(
                    "listen", self.listen, f"of worker {self.count - 1}: {error}"
                ) from None

    @property
    def count(self) -> int:
        """Number of processes."""
        return max(1, len(self.devices)) if self.workers is None else self.workers

    def own_address(self, index: int) -> str | None:
        """Where worker ``index`` alone listens."""
        return None if self.listen is None else address_of(self.listen, index)

    @property
    def own_addresses(self) -> tuple[str, ...]:
        """Of all workers; empty where they have none."""
        found = (self.own_address(index) for index in range(self.count))
        return tuple(address for address in found if address is not None)


def address_of(pattern: str, index: int) -> str:
    """``pattern`` for one worker. Port 0 stays: each is given one."""
    if INDEX in pattern:
        return pattern.replace(INDEX, str(index))
    host, _, port = pattern.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}"
