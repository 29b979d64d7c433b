"""Computes what many servers cost around the servers: scrapes, connections, health checks, lists of servers, downloads.

python -m benchmarks.fleet [--replicas 10 100 1000] [--clients 1000] [--envoys 10] [--json FILE]

One server of kestrel-tiny is measured: its series after calls of every kind, its memory for a connection that watches
health, its processor time for a health check. The rest is arithmetic with these figures and with the sizes that the
code writes. Nothing here has run with more than one server.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client import AsyncKestrelClient
from kestrel_client.connection import Connection
from kestrel_grpc.cluster.directory import Server, as_json, endpoints

from .reports.report import Report, benchmark_parser
from .routing_sim import place
from .traffic.images import jpeg
from .traffic.processes import serve

SCRAPE_S = 15.0
"""Prometheus' usual interval."""
ENVOY_CHECK_S = 1.0
"""deploy/envoy/balancer.yaml and deploy/kubernetes/gateway."""
BEAT_S = 1.0
"""kestrel_grpc.cluster.directory."""
_GIB = 2**30


@dataclass(frozen=True)
class Measured:
    series: int
    scrape_bytes: int
    connection_bytes: float
    check_s: float


async def every_call(address: str) -> None:
    """Every skill, unary and as a stream, so that their series are there."""
    image = jpeg(0, 400, 300)
    async with AsyncKestrelClient(address) as client:
        handle = await client.put_image(image)
        await client.query(handle, "how many?", max_tokens=4)
        await client.caption(image, max_tokens=4)
        await client.segment(image, "circle")
        for ask in (client.point, client.detect):
            await ask(image, "circle", max_objects=1)
        for stream in (
            client.stream_query(image, "what?", max_tokens=4),
            client.stream_caption(image, max_tokens=4),
            client.stream_point(image, "circle", max_objects=1),
            client.stream_detect(image, "circle", max_objects=1),
            client.stream_segment(image, "circle"),
        ):
            async with stream:
                await stream.result()


async def connections(address: str, server: psutil.Process, count: int) -> tuple[float, float]:
    """Bytes of the server for each connection that watches health, and its seconds for each health check."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    request = health_pb2.HealthCheckRequest()
    channels = [grpc.aio.insecure_channel(address, options) for _ in range(count)]
    try:
        before = server.memory_full_info().uss
        watches = [health_pb2_grpc.HealthStub(channel).Watch(request) for channel in channels]
        for watch in watches:
            await watch.read()
        grown = server.memory_full_info().uss - before
        stub, began = health_pb2_grpc.HealthStub(channels[0]), _seconds(server)
        checks = 10 * count
        for _ in range(checks):
            await stub.Check(request)
        return grown / count, (_seconds(server) - began) / checks
    finally:
        for channel in channels:
            await channel.close()


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(count: int) -> Measured:
    """Starts a server and measures it with ``count`` connections."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        flags = ["--device", "cpu", "--metrics-listen", "127.0.0.1:0", "--log-level", "info"]
        flags += ["--max-connections", "0"]
        with serve(flags, log=log) as server:
            asyncio.run(every_call(server.address))
            _, _, address = log.read_text().partition("metrics at ")
            with urllib.request.urlopen(address.split()[0]) as answer:
                text = answer.read().decode()
            process = psutil.Process(server.pid)
            grown, check_s = asyncio.run(connections(server.address, process, count))
    series = sum(bool(line) and not line.startswith("#") for line in text.splitlines())
    return Measured(series, len(text), grown, check_s)


def busiest(replicas: int, places: int) -> float:
    """The largest share of images of a server, divided by the mean, with equally popular images."""
    each = max(1, places // replicas)
    owners = [
        (place(f"{replica}/{n}"), replica) for replica in range(replicas) for n in range(each)
    ]
    owners.sort()
    hashes = [hashed for hashed, _ in owners]
    arcs = np.zeros(replicas)
    for index, (hashed, replica) in enumerate(owners):
        arcs[replica] += (hashed - hashes[index - 1]) % 2**64
    return float(arcs.max() / arcs.mean())


def ring_places(replicas: int) -> tuple[int, int]:
    """Of the client: with a name, and with a list of addresses."""

    def places(target: str | Sequence[str]) -> int:
        config = json.loads(str(dict(Connection(target=target).options)["grpc.service_config"]))
        ring = config["loadBalancingConfig"][0]["ring_hash_experimental"]
        return int(ring["minRingSize"])

    listed = [f"10.0.{n // 250}.{n % 250}:50051" for n in range(replicas)]
    return places("dns:///kestrel:50051"), places(listed)


def sizes(replicas: int) -> tuple[int, int]:
    """Bytes of the directory's answer, and of the file for Envoy."""
    load = {"running": 12.0, "waiting": 0.0, "kv": 0.5, "wait": 0.01}
    servers = [
        Server(
            replica=f"kestrel#servers#{n:08x}",
            address=f"10.20.{n // 250}.{n % 250}:50051",
            node=f"{n:056x}",
            model="moondream2",
            version="0123456789abcdef",
            serving=True,
            load=load,
        )
        for n in range(replicas)
    ]
    return len(json.dumps(as_json(servers))), len(json.dumps(endpoints(servers)))


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = benchmark_parser("fleet", __doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--clients", type=int, default=1000, help="programs with the SDK [1000]")
    parser.add_argument("--envoys", type=int, default=10, help="Envoys as balancers [10]")
    parser.add_argument("--connections", type=int, default=200, help="to measure with [200]")
    parser.add_argument("--weights-gib", type=float, default=3.6, help="of a model [3.6]")
    parser.add_argument("--link-gbit", type=float, default=10.0, help="to the weights [10]")
    args = parser.parse_args(arguments)
    if args.quick:
        args.replicas, args.connections = [10], 5
    report = Report("fleet", vars(args))
    began = time.monotonic()
    one = measure(args.connections)
    report.add(
        "One server",
        {
            "series": one.series,
            "scrape KiB": one.scrape_bytes / 1024,
            "KiB a watching connection": one.connection_bytes / 1024,
            "us a health check": 1e6 * one.check_s,
            "took s": time.monotonic() - began,
        },
    )
    for count in args.replicas:
        named, listed = ring_places(count)
        answer, envoy_file = sizes(count)
        report.add(
            "Metrics",
            {
                "servers": count,
                "series": count * one.series,
                "scrape MB/s": count * one.scrape_bytes / SCRAPE_S / 1e6,
            },
        )
        report.add(
            "Connections and checks",
            {
                "servers": count,
                "of a server, with clients": args.clients,
                "its MiB": args.clients * one.connection_bytes / 2**20,
                "of all": args.clients * count,
                "of a server, with Envoys": args.envoys,
                "checks/s of a server": args.envoys / ENVOY_CHECK_S,
                "its processor %": 100 * args.envoys / ENVOY_CHECK_S * one.check_s,
                "checks/s of an Envoy": count / ENVOY_CHECK_S,
            },
        )
        report.add(
            "Choice of a server: busiest to mean",
            {
                "servers": count,
                "places, by name": named,
                "busiest, by name": busiest(count, named),
                "places, by list": listed,
                "busiest, by list": busiest(count, listed),
            },
        )
        report.add(
            "Lists of servers",
            {
                "servers": count,
                "beats/s at the directory": count / BEAT_S,
                "its answer KiB": answer / 1024,
                "KiB/s to 10 followers": 10 * answer / 1024,
                "Envoy's file KiB, at each change": envoy_file / 1024,
            },
        )
        seconds = count * args.weights_gib * _GIB * 8 / (args.link_gbit * 1e9)
        report.add(
            "All start at once",
            {
                "servers": count,
                "GiB": count * args.weights_gib,
                f"minutes through {args.link_gbit:g} Gbit/s": seconds / 60,
            },
        )
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
