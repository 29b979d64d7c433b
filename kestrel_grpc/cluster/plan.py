"""ClusterPlan: what to deploy, made from the settings. ServerTask: what each server's node gets to know of them."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrel_engine import ConfigError, maintenance

from ..security.listening import check_exposure
from ..settings.cluster import CLUSTER, ClusterConfig
from ..settings.configuration import SECRETS, Configuration, given_settings
from ..settings.flags import configured
from ..settings.model import config_error
from ..settings.sources import FlagSetting, SettingsError, name_of

_DRAIN_DELAY_S = 5.0
"""The default of --drain-delay here, also in Kubernetes: no hook waits before a server of the cluster is stopped."""
_ENDING_S = 20.0
"""Seconds that a server may take to end in addition to its drain delay and grace period."""
_PLACES = ("--listen", "--worker-listen", "--config")
"""Flags about addresses of this machine."""
_FIXED_PORTS = ("--metrics-listen", "--http-listen")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTask:
    """The task of each server, the same on every node."""

    settings: str
    """Those of ``serve`` that are not defaults, as TOML."""
    model: str
    port: int
    drain_delay_s: float
    grace_s: float
    needs_token: bool
    """Whether callers need a token."""
    secrets: tuple[str, ...]
    """The variables with secrets, which each node must have. Secrets themselves are not sent."""
    version: str
    """Changes if anything else changes."""

    @property
    def ending_s(self) -> float:
        """Seconds from SIGTERM in which the server ends."""
        return self.drain_delay_s + self.grace_s + _ENDING_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    config: ClusterConfig
    task: ServerTask
    configuration: Configuration
    device: str

    def gpus(self, cluster_has_gpus: bool) -> float:
        """GPUs of each server."""
        if self.config.replica_gpus is not None:
            return self.config.replica_gpus
        wants = self.device == "cuda" or (self.device == "auto" and cluster_has_gpus)
        return 1.0 if wants else 0.0

    def check_nodes(self, hosts: Sequence[str]) -> None:
        """Raises AddressError if servers at these addresses would not be protected."""
        addresses = tuple(server_address(host, self.task.port) for host in hosts)
        check_exposure(addresses, self.configuration.server.security)


def cluster_plan(
    args: argparse.Namespace,
    settled: Configuration,
    settings: Sequence[FlagSetting],
    environ: Mapping[str, str] | None = None,
) -> ClusterPlan:
    """``settings``: those of ``args``. Raises SettingsError."""
    config = configured(ClusterConfig, args)
    environ = os.environ if environ is None else environ
    server = settled.server
    _check(args, config, settled)
    drain_s = server.drain_delay_s
    if drain_s is None:
        drain_s = min(_DRAIN_DELAY_S, server.grace_s)
    toml = given_settings(
        [each for each in settings if each.section != CLUSTER.section and each.flag not in _PLACES],
        args,
    )
    secrets = tuple(name for name in SECRETS if environ.get(name))
    marked = repr((toml, config.replica_port, drain_s, secrets))
    task = ServerTask(
        settings=toml,
        model=" and ".join(runtime.model for runtime in settled.runtimes),
        port=config.replica_port,
        drain_delay_s=drain_s,
        grace_s=server.grace_s,
        needs_token=server.security.has_tokens,
        secrets=secrets,
        version=hashlib.sha256(marked.encode()).hexdigest()[:12],
    )
    return ClusterPlan(
        config=config, task=task, configuration=settled, device=settled.runtime.device
    )


def server_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check(args: argparse.Namespace, config: ClusterConfig, settled: Configuration) -> None:
    server = settled.server
    if server.workers.count > 1 or server.workers.devices:
        flag = "--devices" if server.workers.devices else "--workers"
        raise SettingsError(
            f"{name_of(args, flag)}: a server of a cluster is one process on one GPU; give --replicas instead"
        )
    for runtime in settled.runtimes:
        if ":" in runtime.device:
            raise SettingsError(
                f"{name_of(args, '--device')}={runtime.device}: Ray gives each server its GPU; give cuda"
            )
        try:
            maintenance.served_name(runtime)
        except ConfigError as error:
            raise config_error(error, args) from None
    for flag in _FIXED_PORTS:
        if getattr(args, flag.removeprefix("--").replace("-", "_")) and not config.replica_port:
            raise SettingsError(
                f"{name_of(args, flag)}: servers on one node cannot share its port; give --replica-port, which puts at "
                "most one server on a node"
            )
    if config.scales and server.security.client_ca is not None and not server.security.has_tokens:
        raise SettingsError(
            f"{name_of(args, '--max-replicas')}: the load is read with a token, and callers have certificates only; "
            "give --auth-tokens too, or a fixed number with --replicas"
        )
