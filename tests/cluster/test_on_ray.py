"""Servers on a real Ray cluster of several nodes on this machine: kills, the number of servers, upgrades.

``make test-ray`` runs this, in an environment that has Ray. -s shows the figures of docs/run/scaling.md.
"""

import importlib.util
import re
import shutil
import subprocess
import time
from asyncio import to_thread
from contextlib import contextmanager
from functools import partial

import psutil
import pytest

from tests.cluster.local_ray import Callers, LocalRay, until
from tests.ports import free_port
from tests.service.command_line import ROOT
from tests.tiny import TINY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: make test-ray"),
]
IMAGE = (ROOT / "clients/python/kestrel_client/commands/demo.jpg").read_bytes()
PAUSE_S = 0.05
"""Where the load does not matter, callers leave the processor to the servers that start."""
SETTINGS = """
[device]
device = "cpu"
[security]
insecure-listen = true
[server]
drain-delay = 3
"""


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    with LocalRay(tmp_path_factory.mktemp("ray"), nodes=4) as local:
        local.port = free_port()
        yield local


@pytest.fixture(scope="module")
def up(ray):
    """Brings servers up, or upgrades those of the test before. Returns the URL of their directory."""
    common = ("--application", "tests", "--directory-listen", f"127.0.0.1:{ray.port}")

    def bring(more="", *flags):
        (file := ray.folder / "kestrel.toml").write_text(SETTINGS + more)
        said = ray.command("--config", file, *common, *flags)
        url = f"http://127.0.0.1:{ray.port}/tests"
        assert f"listed at {url}\n" in said
        return url

    yield bring
    ray.command("down", *common)


@contextmanager
def front(ray, url):
    """Envoy before the servers. Gives its address."""
    words = ray.words("follow", "--front", "--directory", url, "--listen", "127.0.0.1:0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, **ray.surroundings()) as process:
        try:
            line = process.stdout.readline()
            yield re.search(r"listening on (\S+),", line)[1]
        finally:
            process.terminate()
            assert process.wait(60) == 0


def server_at(address):
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    for process in psutil.process_iter():
        try:
            if any(
                each.laddr.port == port and each.status == psutil.CONN_LISTEN
                for each in process.net_connections("tcp")
            ):
                return process
        except psutil.Error:
            continue
    raise AssertionError(address)


def are_three_without(replica, found):
    return len(found) == 3 and replica not in {each.replica for each in found}


async def test_what_is_killed_is_replaced_and_no_call_is_lost(ray, up):
    url = up("[cluster]\nreplicas = 3\n")
    with front(ray, url) as address:
        async with Callers(address, IMAGE, pause_s=PAUSE_S) as callers:
            await callers.some_more()
            took = {}
            for what in ("server", "replica", "node"):
                victim = min(until(url, lambda found: len(found) == 3), key=lambda each: each.node)
                began = time.monotonic()
                if what == "node":
                    ray.kill_node(victim.node)  # Of four nodes one was free.
                else:
                    server = server_at(victim.address)
                    (server if what == "server" else server.parent()).kill()
                await to_thread(until, url, partial(are_three_without, victim.replica))
                took[what] = round(time.monotonic() - began, 1)
                await callers.some_more()
            # Fewer servers of the same settings: nobody restarts.
            before = {each.replica for each in until(url, lambda found: len(found) == 3)}
            await to_thread(up, "[cluster]\nreplicas = 1\n")
            fewer = await to_thread(until, url, lambda found: len(found) == 1)
            await callers.some_more()
        print(
            f"\nseconds until replaced: {took}; {sum(callers.models.values())} calls, lost {callers.lost}, "
            f"slowest {callers.slowest_s:.2f} s; streams {dict(callers.streams)}"
        )
    assert callers.lost == []
    assert set(callers.streams) <= {"whole", "UNAVAILABLE", "UNAVAILABLE, when to retry"}
    assert callers.streams["whole"]
    assert {each.replica for each in fewer} < before


async def test_the_load_decides_how_many_there_are(ray, up):
    while len(ray.ray.worker_nodes) < 4:
        ray.add_node()
    url = up(
        "[cluster]\nreplicas = 1\nmax-replicas = 4\ntarget-utilization = 0.1\nscale-down-delay = 5\n"
    )
    until(url, lambda found: len(found) == 1)
    with front(ray, url) as address:
        async with Callers(address, IMAGE) as callers:
            began = time.monotonic()
            await to_thread(until, url, lambda found: len(found) == 4)
            grown_s = time.monotonic() - began
            await callers.some_more()
        # One caller goes on, so that a call that the end of a server costs would be seen.
        async with Callers(address, IMAGE, unary=1, streams=0) as few:
            began = time.monotonic()
            await to_thread(until, url, lambda found: len(found) < 4)
            await to_thread(until, url, lambda found: len(found) <= 2)
            shrunk_s = time.monotonic() - began
            await few.some_more(10)
        print(
            f"\n1 to 4 in {grown_s:.1f} s with {sum(callers.models.values())} calls, lost {callers.lost}, streams "
            f"{dict(callers.streams)}; back in {shrunk_s:.1f} s, {sum(few.models.values())} calls, lost {few.lost}"
        )
    assert callers.lost == few.lost == []
    assert set(callers.streams) == {"whole"}


async def test_a_new_model_is_rolled_out_without_a_lost_call(ray, up, tmp_path):
    while len(ray.ray.worker_nodes) < 3:
        ray.add_node()
    shutil.copytree(TINY, tmp_path / "second")
    settings = "[cluster]\nreplicas = 2\nsurge = 50\n"
    url = up(settings)
    with front(ray, url) as address:
        async with Callers(address, IMAGE, pause_s=PAUSE_S) as callers:
            await callers.some_more()
            (first,) = callers.models
            old = {each.version for each in until(url, lambda found: len(found) == 2)}
            began = time.monotonic()
            await to_thread(up, settings, "--weights", tmp_path / "second", "--model", "second")
            found = await to_thread(
                until,
                url,
                lambda found: len(found) == 2 and not old & {each.version for each in found},
            )
            took_s = time.monotonic() - began
            await callers.some_more()
        print(
            f"\nrolled out in {took_s:.1f} s with {dict(callers.models)} calls, lost {callers.lost}, streams "
            f"{dict(callers.streams)}"
        )
    assert callers.lost == []
    assert set(callers.streams) == {"whole"}
    assert len({each.version for each in found}) == 1
    status = ray.command("status", "--directory", url).splitlines()
    assert [line.split()[:2] for line in status] == [[each.address, "second"] for each in found]
    assert set(callers.models) == {first, "second"}
