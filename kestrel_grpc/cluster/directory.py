"""Directory: the servers of a cluster by what they say of themselves, and the forms in which others read them.

Nothing is stored: each server says every BEAT_S seconds where it is. A directory that has just started, or was
restarted, knows all of them after COLLECTING_S. It is pure: callers pass the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..workers.front.bootstrap import SERVERS

BEAT_S = 1.0
SILENT_S = 6.0
"""A server that says nothing for so long is not listed, unless all are silent."""
FORGET_S = 60.0
"""Nor is it remembered after so long."""
COLLECTING_S = 3.0
_MOST_SERVERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What one server says of itself."""

    replica: str
    """Ray Serve's id of it."""
    address: str
    node: str
    model: str
    version: str
    """Of the settings (plan.py)."""
    serving: bool
    """Whether it takes calls: it is ready, and does not drain."""
    load: dict[str, float] = field(default_factory=dict)


class Directory:
    def __init__(self, now: float) -> None:
        self._complete_at = now + COLLECTING_S
        self._seen: dict[str, tuple[float, Server]] = {}

    def beat(self, server: Server, now: float) -> None:
        """``server`` says that it is there. One that is not serving is remembered, and not listed."""
        if server.replica in self._seen or len(self._seen) < _MOST_SERVERS:
            self._seen[server.replica] = (now, server)
        # A server that starts at the address of one that was killed takes its place.
        for replica, (_, other) in list(self._seen.items()):
            if other.address == server.address and replica != server.replica:
                del self._seen[replica]

    def leave(self, replica: str) -> None:
        self._seen.pop(replica, None)

    def is_complete(self, now: float) -> bool:
        """Whether every server has had the time to say that it is there."""
        return now >= self._complete_at

    def servers(self, now: float) -> list[Server]:
        """The servers to which calls may go, by address.

        If all are silent, the way to this directory is broken rather than the servers. They stay listed, because
        clients and Envoy check the health of each.
        """
        self._forget(now)
        serving = [(at, server) for at, server in self._seen.values() if server.serving]
        fresh = [server for at, server in serving if now - at < SILENT_S]
        return sorted(fresh or [server for _, server in serving], key=lambda each: each.address)

    def _forget(self, now: float) -> None:
        fresh = any(now - at < SILENT_S for at, _ in self._seen.values())
        if fresh:
            self._seen = {k: v for k, v in self._seen.items() if now - v[0] < FORGET_S}


def as_json(servers: Sequence[Server]) -> dict[str, Any]:
    return {"servers": [asdict(each) for each in servers]}


def from_json(value: Any) -> list[Server]:
    """Raises ValueError if ``value`` is not what ``as_json`` makes. Unknown fields are ignored."""
    try:
        listed = value["servers"]
        return [
            Server(
                **{name: _text(each[name]) for name in ("replica", "address", "node", "model")},
                version=_text(each["version"]),
                serving=each["serving"] is True,
                load={str(k): float(v) for k, v in each["load"].items()},
            )
            for each in listed
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"is not the answer of a directory ({type(error).__name__}: {error})"
        ) from None


def endpoints(servers: Sequence[Server]) -> dict[str, Any]:
    """The servers as Envoy's EDS reads them from a file."""
    listed = []
    for server in servers:
        host, _, port = server.address.rpartition(":")
        address = {"address": host.strip("[]"), "port_value": int(port)}
        listed.append({"endpoint": {"address": {"socket_address": address}}})
    return {
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
                "cluster_name": SERVERS,
                "endpoints": [{"lb_endpoints": listed}],
            }
        ]
    }


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value
