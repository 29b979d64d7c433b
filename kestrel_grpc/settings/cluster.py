"""ClusterConfig: whole servers on the nodes of a Ray cluster. How many, on what resources, and when there are more."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine import ConfigError, SettingGroup, check_settings, checked

from .addresses import parse_address, unix_path
from .flags import matching

CLUSTER = SettingGroup("cluster", "cluster")
MOST_REPLICAS = 1000
_name = matching(
    r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?",
    "1 to 63 lower-case letters, digits and dashes, not a dash at an end",
)


def _tcp(text: str) -> str:
    if unix_path(text) is not None:
        raise ValueError("must be HOST:PORT")
    return parse_address(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The default is one replica: one server process on one GPU, or on processors. Raises ConfigError."""

    application: str = CLUSTER.setting(
        "kestrel",
        "name of the application of Ray Serve, and the path of its directory over HTTP; another one for each cluster "
        "of servers",
        parse=_name,
        metavar="NAME",
    )
    directory_listen: str = CLUSTER.setting(
        "127.0.0.1:8000",
        "where Ray Serve answers HTTP on the cluster's head, with the list of servers; no effect once Serve runs",
        parse=_tcp,
        metavar="ADDRESS",
    )
    replicas: int = CLUSTER.setting(
        1, "number of servers; with --max-replicas the smallest number", low=1, high=MOST_REPLICAS
    )
    max_replicas: int | None = CLUSTER.setting(
        None,
        "largest number of servers; the load decides how many there are",
        low=1,
        high=MOST_REPLICAS,
        shown="that of --replicas",
    )
    replica_gpus: float | None = CLUSTER.setting(
        None,
        "GPUs of a server, for Ray's choice of a node; 0.5 lets two servers share one",
        low=0,
        high=1,
        shown="1 with --device cuda, and with auto if the cluster has GPUs; otherwise 0",
    )
    replica_cpus: float = checked(1.0, low=0, high=1024)
    """Processors of a server, for Ray's choice of a node."""
    replica_port: int = CLUSTER.setting(
        0,
        "port of every server, at the address of its node; a node then has at most one; 0: each gets a free port",
        metavar="PORT",
        low=0,
        high=65535,
    )
    surge: int = CLUSTER.setting(
        0,
        "how many servers more than usual there may be during an upgrade, in percent; with 0, old servers end before "
        "new ones start on their GPUs",
        metavar="PERCENT",
        low=0,
        high=100,
    )
    target_utilization: float = CLUSTER.setting(
        0.8,
        "servers are added above this mean of requests divided by places in the batch",
        metavar="SHARE",
        above=0,
        high=100,
    )
    target_queue_wait_s: float = checked(1.0, above=0)
    """Servers are added above this mean wait of requests in the queue."""
    target_kv_use: float = checked(0.9, above=0, high=1)
    """Servers are added above this mean share of KV pages that requests use."""
    scale_up_delay_s: float = checked(10.0)
    """How long the load must be too high before servers are added."""
    scale_down_delay_s: float = CLUSTER.setting(
        300.0, "how long fewer servers must be enough before some end", low=0
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            limit = f"must be at least --replicas, {self.replicas}"
            raise ConfigError("max_replicas", self.max_replicas, limit)

    @property
    def scales(self) -> bool:
        """Whether the load decides the number of servers."""
        return self.max_replicas is not None and self.max_replicas > self.replicas
