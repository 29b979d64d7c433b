"""The Kubernetes objects around servers (gateways, llm-d's router, KEDA, KubeRay) have valid references.

KESTREL_CRDS=FOLDER also compares them with the schemas of their projects (crd_schemas.py).
"""

import ast
import importlib
import re
from pathlib import Path

import pytest
import yaml

from kestrel_client.connection import IMAGE_HEADER
from kestrel_grpc.settings.cluster import ClusterConfig
from kestrel_grpc.settings.configuration import add_flags, configuration
from kestrel_grpc.settings.flags import Parser, add_settings
from tests.deploy import crd_schemas
from tests.deploy.test_manifests import AROUND, DEPLOY, documents

HOME = DEPLOY / "kubernetes"
TELEMETRY = (DEPLOY.parent / "docs/run/metrics.md").read_text()
"""Its table holds every metric, which another test compares with the code."""


def objects(path):
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((HOME / path).read_text())}


def base(path):
    return yaml.safe_load((HOME / "base" / path).read_text())


def is_known(metric):
    return f"`{metric.removesuffix('_bucket')}`" in TELEMETRY


def grpc_port():
    [port] = [each for each in base("service.yaml")["spec"]["ports"] if each["name"] == "grpc"]
    return port["port"]


def test_the_gateway_hashes_the_header_that_clients_send():
    named = objects("gateway/gateway.yaml")
    [rule] = named["GRPCRoute"]["spec"]["rules"]
    assert "matches" not in rule, "health and reflection pass too"
    [backend] = rule["backendRefs"]
    assert backend == {"name": base("service.yaml")["metadata"]["name"], "port": grpc_port()}
    assert named["GRPCRoute"]["spec"]["parentRefs"] == [
        {"name": named["Gateway"]["metadata"]["name"]}
    ]
    policy = objects("gateway/policy.yaml")["BackendTrafficPolicy"]["spec"]
    [target] = policy["targetRefs"]
    assert (target["kind"], target["name"]) == ("GRPCRoute", named["GRPCRoute"]["metadata"]["name"])
    assert policy["loadBalancer"]["consistentHash"]["headers"] == [{"name": IMAGE_HEADER}]
    # Envoy's own limits of 15 s and 5 minutes would end streams.
    assert set(policy["timeout"]["http"].values()) == {"0s"}


def test_the_picker_knows_our_metrics_and_finds_the_pods():
    config = yaml.safe_load((HOME / "inference/picker-config.yaml").read_text())
    plugins = {each["type"]: each.get("parameters", {}) for each in config["plugins"]}
    [source] = config["dataLayer"]["sources"]
    named = [source["pluginRef"], *(each["pluginRef"] for each in source["extractors"])]
    named += [each["pluginRef"] for each in config["requestHandler"]["parsers"]]
    [profile] = config["schedulingProfiles"]
    named += [each["pluginRef"] for each in profile["plugins"]]
    assert {*named, "single-profile-handler"} == set(plugins)
    extractor = plugins["core-metrics-extractor"]
    [engine] = extractor["engineConfigs"]
    metrics = [value for key, value in engine.items() if key.endswith("Spec")]
    assert len(metrics) == 4 and all(map(is_known, metrics)), metrics
    affinity = plugins["session-affinity-scorer"]["sessionIdConfig"]
    assert affinity["sources"] == [{"header": IMAGE_HEADER}]
    assert plugins["metrics-data-source"]["port"] == 9464

    patch = yaml.safe_load((HOME / "inference/deployment.yaml").read_text())
    labels = patch["spec"]["template"]["metadata"]["labels"]
    assert labels == {"llm-d.ai/engine-type": engine["name"]}
    pool = objects("inference/pool.yaml")["InferencePool"]["spec"]
    assert pool["selector"]["matchLabels"] == labels
    assert pool["targetPorts"] == [{"number": grpc_port()}]
    picker = objects("inference/picker.yaml")
    reference = pool["endpointPickerRef"]
    assert reference["name"] == picker["Service"]["metadata"]["name"]
    [port] = picker["Service"]["spec"]["ports"]
    assert reference["port"]["number"] == port["port"]
    spec = picker["Deployment"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    assert (
        f"--pool-name={objects('inference/pool.yaml')['InferencePool']['metadata']['name']}"
        in (container["args"])
    )
    assert container["securityContext"]["readOnlyRootFilesystem"]
    own = spec["template"]["metadata"]["labels"]
    assert own == spec["selector"]["matchLabels"] == picker["Service"]["spec"]["selector"]
    rules = yaml.safe_load((HOME / "inference/network.yaml").read_text())["spec"]["ingress"]
    [scrapers] = [rule["from"] for rule in rules if rule["ports"][0]["port"] == 9464]
    assert {"podSelector": {"matchLabels": own}} in scrapers


def test_keda_asks_for_our_metrics_and_owns_the_number_of_pods():
    spec = objects("scaling/scaling.yaml")["ScaledObject"]["spec"]
    deployment = base("deployment.yaml")
    assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert spec["minReplicaCount"] > base("disruption.yaml")["spec"]["maxUnavailable"]
    for trigger in spec["triggers"]:
        metrics = re.findall(r"kestrel_\w+", trigger["metadata"]["query"])
        assert metrics and all(map(is_known, metrics)), metrics
        assert 'job="kestrel"' in trigger["metadata"]["query"]
        assert float(trigger["metadata"]["threshold"]) > 0
    patch = yaml.safe_load((HOME / "scaling/deployment.yaml").read_text())
    assert patch["spec"] == {"replicas": None}


def test_kuberay_runs_the_application_with_a_valid_file(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    spec = objects("ray/service.yaml")["RayService"]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = Path(importlib.util.find_spec(module).origin).read_text()
    [found] = [
        each
        for each in ast.parse(source).body
        if isinstance(each, ast.FunctionDef) and each.name == name
    ]
    assert [arg.arg for arg in found.args.args] == ["args"]
    cluster = spec["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert application["args"]["config"] in mounts
        assert {each["name"] for each in container["volumeMounts"]} == {
            each["name"] for each in pod["volumes"]
        }
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
    parser = Parser(prog="cluster")
    add_flags(parser, {})
    add_settings(parser, ClusterConfig, environ={})
    settled = parser.parse_args(["--config", str(HOME / "ray/kestrel.toml")])
    assert configuration(settled).server.security.auth_tokens
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (
        settled.replicas,
        settled.max_replicas,
    )


@pytest.mark.parametrize("folder", AROUND)
def test_the_projects_own_schemas_know_every_field(folder):
    known = crd_schemas.definitions()
    if known is None:
        pytest.skip(f"{crd_schemas.FOLDER} names no folder of definitions")
    for each in filter(crd_schemas.is_custom, documents(folder)):
        assert not known.errors(each), each["kind"]


def test_an_unknown_field_or_a_wrong_type_is_an_error(tmp_path):
    port = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    spec = {"type": "object", "properties": {"port": port}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    versions = [{"name": "v1", "schema": schema}]
    defined = {"group": "a.b", "names": {"kind": "Pool"}, "versions": versions}
    text = yaml.safe_dump({"kind": "CustomResourceDefinition", "spec": defined})
    (tmp_path / "crd.yaml").write_text(f"{{{{- if .Values.enabled }}}}\n{text}{{{{- end }}}}\n")
    known = crd_schemas.Definitions(tmp_path)

    def wrong(spec, kind="Pool"):
        found = {"apiVersion": "a.b/v1", "kind": kind, "metadata": {}, "spec": spec}
        return len(known.errors(found))

    assert wrong({"port": {"number": 1}}) == 0
    assert wrong({"port": {"number": "1"}}) == wrong({"port": {}}) == wrong({"prot": {}}) == 1
    assert wrong({}, "Other") == 1
