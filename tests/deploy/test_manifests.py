"""Kubernetes' manifests and the compose file: they parse, their references exist, and they agree with each other and
with the server."""

import ipaddress
import re
import shutil
import subprocess
import warnings
from functools import cache
from pathlib import Path

import pytest
import yaml

from kestrel_grpc.settings.configuration import add_flags, configuration
from kestrel_grpc.settings.flags import Parser
from tests.deploy.crd_schemas import is_custom

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDERS = ("base", "cuda", "tls")
"""Kustomizations of servers alone."""
AROUND = ("gateway", "inference", "scaling", "ray")
"""Kustomizations with what stands around servers: test_kubernetes_around.py."""
ALL = sorted(DEPLOY.rglob("*.yaml"))


@pytest.fixture(autouse=True)
def outside_kubernetes(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def settled(environ, *flags):
    parser = Parser(prog="serve")
    add_flags(parser, environ)
    return configuration(parser.parse_args(flags)).server


def one(path):
    return yaml.safe_load((DEPLOY / path).read_text())


def rendered(folder):
    """Objects by kind."""
    return {each["kind"]: each for each in documents(folder)}


@cache
def documents(folder):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl isn't there to render")
    done = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes" / folder)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_it_is_yaml_with_no_key_twice(path):
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"{path.name}: a key is there twice in {keys}"
            return super().construct_mapping(node, deep)

    assert list(yaml.load_all(path.read_text(), Strict))


def pod_of(deployment):
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    return spec, container


def check_pod(spec, container):
    """What holds for every variant."""
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        kinds = {"grpc", "exec"} & set(container[probe])
        assert len(kinds) == 1, f"{probe} must have one way to look, has {kinds}"
        if kinds == {"grpc"}:
            assert container[probe]["grpc"] == {"port": 50051}, "the service that follows the model"
        else:
            assert container[probe]["exec"]["command"][:2] == ["kestrel-grpc", "health"]
    starting = container["startupProbe"]
    assert starting["failureThreshold"] * starting["periodSeconds"] >= 1800
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    for volume in spec["volumes"]:
        assert len(volume) == 2, f"{volume} has one source"


def check_times(spec, container, config):
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pause + config.leaving_s + config.grace_s + 10 < spec["terminationGracePeriodSeconds"]


def check_config(container, config):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"0.0.0.0:{ports['grpc']}" in config.listen
    assert config.telemetry.prometheus == f"0.0.0.0:{ports['metrics']}"
    assert "unix:/tmp/kestrel.sock" in config.listen
    assert config.security.has_tokens
    assert config.security.insecure_listen == (config.security.tls is None)
    for file in (
        config.security.auth_tokens,
        *([config.security.tls.certificate] if config.security.tls else []),
    ):
        folders = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert str(Path(file).parent) in folders, file


def test_the_base_holds_together(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    spec, container = pod_of(one("kubernetes/base/deployment.yaml"))
    check_pod(spec, container)
    config = settled({}, "--config", str(DEPLOY / "kubernetes/base/kestrel.toml"))
    check_times(spec, container, config)
    check_config(container, config)
    service = one("kubernetes/base/service.yaml")["spec"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == names
    budget = one("kubernetes/base/disruption.yaml")["spec"]
    labels = one("kubernetes/base/kustomization.yaml")["labels"][0]["pairs"]
    network = one("kubernetes/base/network.yaml")["spec"]
    assert budget["selector"]["matchLabels"] == network["podSelector"]["matchLabels"] == labels
    assert one("kubernetes/base/deployment.yaml")["spec"]["replicas"] > budget["maxUnavailable"]


@pytest.mark.parametrize("folder", FOLDERS + AROUND)
def test_what_a_kustomization_names_is_there(folder):
    home = DEPLOY / "kubernetes" / folder
    told = yaml.safe_load((home / "kustomization.yaml").read_text())
    named = [*told["resources"], *(patch["path"] for patch in told.get("patches", ()))]
    named += [file for each in told.get("configMapGenerator", ()) for file in each["files"]]
    named += told.get("configurations", ())
    assert all((home / name).exists() for name in named)
    present = {path.name for path in home.iterdir()} - {"kustomization.yaml"}
    assert present == {name for name in named if not name.startswith("..")}


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_variant_renders_to_something_that_holds_together(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    objects = rendered(folder)
    spec, container = pod_of(objects["Deployment"])
    check_pod(spec, container)
    path = tmp_path / "kestrel.toml"
    path.write_text(objects["ConfigMap"]["data"]["kestrel.toml"])
    environ = {each["name"]: each["value"] for each in container["env"]}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert environ.pop("KESTREL_CONFIG") in mounts
    config = settled(environ, "--config", str(path))
    check_times(spec, container, config)
    check_config(container, config)
    assert (config.security.tls is not None) == (folder == "tls")
    assert container["image"] == f"kestrel-grpc:{'cuda' if folder == 'cuda' else 'cpu'}"
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "cuda")
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_a_variant_that_fetches_its_model_may_leave_the_cluster(folder):
    rules = rendered(folder)["NetworkPolicy"]["spec"]["egress"]
    names, *rest = rules
    cluster_dns = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    assert names["to"] == [{"namespaceSelector": cluster_dns}]
    assert {port["port"] for port in names["ports"]} == {53}
    assert all(rule["to"] for rule in rules), "a rule without an address allows all of them"
    if folder != "cuda":
        assert rest == []
        return
    [hub] = rest
    [block] = (each["ipBlock"] for each in hub["to"])
    closed = [ipaddress.ip_network(net) for net in block["except"]]
    for address in ("169.254.169.254", "10.1.2.3", "172.31.0.1", "192.168.1.1", "100.100.100.200"):
        assert any(ipaddress.ip_address(address) in net for net in closed), address
    assert hub["ports"] == [{"protocol": "TCP", "port": 443}]


@pytest.mark.slow_with("1.29", "1.31", "1.34")
@pytest.mark.parametrize("version", ["1.29", "1.31", "1.34", "1.37"])
@pytest.mark.parametrize("folder", FOLDERS + AROUND)
def test_kubernetes_own_schemas_know_every_field(folder, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The library's own, about its dependencies.
        for each in filter(lambda found: not is_custom(found), documents(folder)):
            kubernetes_validate.validate(each, version, strict=True)


def test_the_compose_file_wires_what_there_is():
    home = DEPLOY / "compose"
    told = one("compose/compose.yaml")
    services = told["services"]
    assert set(services) == {"kestrel", "collector", "prometheus", "grafana"}
    for name, service in services.items():
        assert ":" in service["image"] and not service["image"].endswith(":latest"), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (
                (home / source).exists() if source.startswith(".") else source in told["volumes"]
            )
            assert known, volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nobody is asked who calls"
    kestrel = services["kestrel"]
    assert (home / kestrel["build"]["context"] / kestrel["build"]["dockerfile"]).exists()
    environ = {k: re.sub(r"\$\{\w+:-(.*?)\}", r"\1", v) for k, v in kestrel["environment"].items()}
    config = settled({**environ, "KESTREL_LISTEN": "0.0.0.0:50051"})
    assert config.security.insecure_listen
    assert int(kestrel["stop_grace_period"].removesuffix("s")) > config.leaving_s + config.grace_s
    endpoint = re.fullmatch(r"http://(\w+):(\d+)", environ["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert endpoint and endpoint[1] in services
    collector = one("compose/collector.yaml")
    listens = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert listens.rpartition(":")[2] == endpoint[2]
    for part in collector["service"]["pipelines"]["traces"].items():
        assert set(part[1]) <= set(collector[part[0]])
    scrape = one("compose/prometheus.yaml")["scrape_configs"][0]
    host, port = scrape["static_configs"][0]["targets"][0].split(":")
    assert host in services and config.telemetry.prometheus.endswith(f":{port}")
    [source] = one("compose/grafana/datasources.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    folder = one("compose/grafana/dashboards.yaml")["providers"][0]["options"]["path"]
    assert any(v.split(":")[1] == f"{folder}/kestrel.json" for v in services["grafana"]["volumes"])


def test_both_prometheus_files_scrape_the_job_that_the_alerts_ask_for():
    alerts = (DEPLOY / "prometheus/alerts.yaml").read_text()
    for path in ("compose/prometheus.yaml", "prometheus/prometheus.yaml"):
        told = one(path)
        assert told["rule_files"] == ["alerts.yaml"]
        assert f'job="{told["scrape_configs"][0]["job_name"]}"' in alerts


def test_a_unit_of_systemd_waits_longer_than_the_grace():
    unit = (DEPLOY / "systemd/kestrel-grpc.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)", unit, re.MULTILINE)
    config = settled({})
    assert config.leaving_s == 5.0
    assert stop and int(stop[1]) > config.leaving_s + config.grace_s
    assert "Type=notify" in unit and "WatchdogSec=" in unit and "DynamicUser=yes" in unit


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    unit = (DEPLOY / "systemd/kestrel-grpc.service").read_text()
    path = tmp_path / "kestrel-grpc.service"
    path.write_text(unit.replace("/opt/kestrel/bin/kestrel-grpc", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert path.name not in done.stderr and done.returncode == 0, done.stderr
