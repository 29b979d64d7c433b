"""The replicas of Ray Serve, and their directory. The only module that imports Ray.

Ray Serve carries no calls here. Its HTTP proxy answers with the directory, and its handles carry what servers say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.serve.api import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kestrel_client import KestrelError
from kestrel_engine import clock

from .. import __version__
from ..settings.cluster import ClusterConfig
from .directory import BEAT_S, Directory, Server, as_json
from .head import ClusterError, checked_head
from .plan import ClusterPlan, ServerTask
from .scaling import LoadPolicy
from .server import ServerError, ServerProcess

logger = logging.getLogger(__name__)

SERVERS, DIRECTORY = "Replica", "Directory"
_HEALTH_EVERY_S, _HEALTH_WITHIN_S = 1.0, 30.0
_UNWELL_S = 120.0
"""A server that runs and does not serve for so long, such as one that an administrator drained, is replaced."""
_METRICS_S, _LOOK_BACK_S = 1.0, 5.0
_SENDING_S = 5.0
_LOOK_S = 0.5
_MOST_STARTS = 3
"""How often Serve tries to start a server before an upgrade fails."""


class Replica:
    """Runs a server on its node, and says where it is, whether it serves and how busy it is."""

    async def __init__(self, task: ServerTask) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._task, self._name = task, context.replica_tag
        self._beating: asyncio.Task[None] | None = None
        """None until the server has started. Then there is nothing to end."""
        self._directory = serve.get_deployment_handle(DIRECTORY, app_name=context.app_name)
        self._server = await ServerProcess.start(task, ray.util.get_node_ip_address(), self._name)
        self._load: dict[str, float] = {}
        self._well_at = clock.now()
        self._beating = asyncio.create_task(self._beat())

    async def check_health(self) -> None:
        """Serve replaces this replica if this raises three times in a row."""
        how = self._server.has_ended()
        if how is not None:
            raise ServerError(f"the server at {self._server.address} has ended: {how}")
        unwell_s = clock.now() - self._well_at
        if unwell_s > _UNWELL_S:
            raise ServerError(
                f"the server at {self._server.address} has not served for {unwell_s:.0f} s"
            )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._load

    async def __del__(self) -> None:
        """Serve waits for this when it ends a replica."""
        if self._beating is None:
            return
        self._beating.cancel()
        with contextlib.suppress(Exception):  # Nobody can be told; the server ends nevertheless.
            async with asyncio.timeout(_SENDING_S):
                await self._directory.leave.remote(self._name)
        await self._server.stop(self._task.ending_s)

    async def _beat(self) -> None:
        lost = False
        while self._server.has_ended() is None:
            serving = await self._server.is_serving()
            if serving:
                self._well_at = clock.now()
                with contextlib.suppress(KestrelError):
                    self._load = await self._server.load()
            try:
                async with asyncio.timeout(_SENDING_S):
                    await self._directory.beat.remote(self._self(serving))
                lost = False
            except Exception as error:  # Whatever Ray raises while the directory restarts.
                if not lost:
                    logger.warning("the directory does not answer: %s", error)
                lost = True
            await asyncio.sleep(BEAT_S)
        with contextlib.suppress(Exception):  # It expires there.
            await self._directory.leave.remote(self._name)

    def _self(self, serving: bool) -> Server:
        return Server(
            replica=self._name,
            address=self._server.address,
            node=ray.get_runtime_context().get_node_id(),
            model=self._task.model,
            version=self._task.version,
            serving=serving,
            load=self._load,
        )


class DirectoryReplica:
    """The directory. ``GET /NAME`` lists the servers as JSON, ``GET /NAME/addresses`` their addresses as text."""

    def __init__(self, _: Any) -> None:
        """The servers are an argument only so that Serve deploys them too."""
        self._directory = Directory(clock.now())

    async def beat(self, server: Server) -> None:
        self._directory.beat(server, clock.now())

    async def leave(self, replica: str) -> None:
        self._directory.leave(replica)

    async def __call__(self, request: Request) -> Response:
        now = clock.now()
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse(
                "the directory answers GET only\n", 405, {"allow": "GET, HEAD"}
            )
        if not self._directory.is_complete(now):
            return PlainTextResponse("the directory has just started\n", 503, {"retry-after": "1"})
        servers = self._directory.servers(now)
        path = request.url.path.rstrip("/")
        if path.endswith("/addresses"):
            return PlainTextResponse("".join(f"{each.address}\n" for each in servers))
        return JSONResponse(as_json(servers))


def application(plan: ClusterPlan) -> serve.Application:
    """The application for ``serve.run``. With a connection to the cluster, it checks the nodes. Raises ClusterError,
    AddressError."""
    config, gpus = plan.config, _gpus(plan)
    # Ray's own decorator gives no version, and then every deployment replaces all servers, even if only their number
    # changes.
    replica = serve.deployment(Replica).options(
        _internal=True,
        version=f"{__version__}-{plan.task.version}",
        name=SERVERS,
        autoscaling_config=_autoscaling(config),
        ray_actor_options={"num_cpus": config.replica_cpus, "num_gpus": gpus},
        max_replicas_per_node=1 if config.replica_port else None,
        health_check_period_s=_HEALTH_EVERY_S,
        health_check_timeout_s=_HEALTH_WITHIN_S,
        graceful_shutdown_timeout_s=plan.task.ending_s + 2 * _SENDING_S,
        max_constructor_retry_count=_MOST_STARTS,
        max_surge_percent=config.surge,
    )
    directory = serve.deployment(DirectoryReplica).options(
        _internal=True,
        version=__version__,
        name=DIRECTORY,
        ray_actor_options={"num_cpus": 0},
        logging_config={"enable_access_log": False},  # A line for each beat.
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=1.0,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=_HEALTH_EVERY_S,
    )
    return directory.bind(replica.bind(plan.task))


def connect() -> None:
    """Raises ClusterError."""
    address = checked_head()
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        raise ClusterError(
            f"no Ray cluster at {address} ({line}); start one with ray start --head"
        ) from None


def deploy(plan: ClusterPlan, say: Callable[[str], None]) -> None:
    """Deploys or upgrades, and waits until all servers serve. ``say``: gets how far that is. Raises ClusterError,
    AddressError."""
    config = plan.config
    host, _, port = config.directory_listen.rpartition(":")
    app = application(plan)
    room = _room(plan)
    if room < config.replicas:
        say(
            f"the nodes have room for {room} of {config.replicas} servers; the others wait until nodes join or servers "
            "end"
        )
    serve.start(
        proxy_location="HeadOnly", http_options={"host": host.strip("[]"), "port": int(port)}
    )
    target = RunTarget(app, name=config.application, route_prefix=f"/{config.application}")
    serve.run_many([target], wait_for_applications_running=False)
    said = ""
    while (status := _status(config)).status is not ApplicationStatus.RUNNING:
        servers = status.deployments.get(SERVERS)
        states = {} if servers is None else servers.replica_states
        why = "" if servers is None else servers.message.strip()
        if status.status is ApplicationStatus.DEPLOY_FAILED:
            raise ClusterError(f"the servers do not start: {_last_line(why or status.message)}")
        counts = ", ".join(f"{count} {str(state).lower()}" for state, count in states.items())
        if (news := f"servers: {counts or 'none'}. {why.partition(chr(10))[0]}".strip()) != said:
            say(said := news)
        clock.sleep(_LOOK_S)


def remove(config: ClusterConfig) -> None:
    serve.delete(config.application)


def _status(config: ClusterConfig) -> ApplicationStatusOverview:
    status = serve.status().applications.get(config.application)
    if status is None:
        raise ClusterError(f"the application {config.application} was removed")
    return status


def _last_line(text: str) -> str:
    """Of a traceback, the error."""
    return text.strip().rpartition("\n")[2].strip()


def _gpus(plan: ClusterPlan) -> float:
    """GPUs of each server. Raises ClusterError, AddressError."""
    if not ray.is_initialized():  # ``serve run`` connects afterwards.
        if plan.device == "auto" and plan.config.replica_gpus is None:
            raise ClusterError(
                "device=auto: serve run needs cpu or cuda, or replica-gpus in [cluster]"
            )
        return plan.gpus(False)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    most = max(node["Resources"].get("GPU", 0) for node in nodes)
    gpus = plan.gpus(most > 0)
    if gpus > most:
        raise ClusterError(
            f"each server needs {gpus:g} GPU, and no node of the cluster has as many; give --device cpu, or start "
            "nodes with GPUs"
        )
    plan.check_nodes([node["NodeManagerAddress"] for node in nodes])
    return gpus


def _room(plan: ClusterPlan) -> int:
    """How many servers the nodes could run if they ran nothing else."""
    config = plan.config
    wanted = {"CPU": config.replica_cpus, "GPU": _gpus(plan)}
    room = 0
    for node in ray.nodes():
        if node["Alive"]:
            here = [int(node["Resources"].get(k, 0) / v) for k, v in wanted.items() if v]
            room += min([*here, 1] if config.replica_port else here, default=config.replicas)
    return room


def _autoscaling(config: ClusterConfig) -> AutoscalingConfig:
    """A fixed number has limits that are equal. Replicas that start without this never report their load, so an
    upgrade that gives them ``max_replicas`` would have no effect (Ray 2.60)."""
    policy = AutoscalingPolicy(
        policy_function=LoadPolicy,
        policy_kwargs={
            "utilization": config.target_utilization,
            "queue_wait_s": config.target_queue_wait_s,
            "kv_use": config.target_kv_use,
        },
    )
    with warnings.catch_warnings():
        # The interval is a variable of every node otherwise, and 10 s.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=config.replicas,
            max_replicas=config.max_replicas if config.scales else config.replicas,
            metrics_interval_s=_METRICS_S,
            look_back_period_s=_LOOK_BACK_S,
            upscale_delay_s=config.scale_up_delay_s,
            downscale_delay_s=config.scale_down_delay_s,
            policy=policy,
        )
