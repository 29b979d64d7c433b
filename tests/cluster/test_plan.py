"""What the settings say of a cluster, and how ``kestrel-grpc cluster`` refuses them."""

import re
import sys
import tomllib

import pytest

from kestrel_grpc.cluster.plan import cluster_plan
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.cluster import ClusterConfig
from kestrel_grpc.settings.configuration import add_flags, configuration
from kestrel_grpc.settings.flags import Parser, add_settings
from kestrel_grpc.settings.sources import SettingsError
from tests.service.command_line import here

FILE = """
[cluster]
replicas = 2
max-replicas = 4
[device]
device = "cpu"
[server]
listen = "0.0.0.0:50051"
[requests]
max-queue = 9
"""


@pytest.fixture
def planned(tmp_path):
    def plan(text="", *flags, environ=None):
        (file := tmp_path / "kestrel.toml").write_text(text)
        parser = Parser(prog="kestrel-grpc cluster")
        add_flags(parser, environ or {})
        add_settings(parser, ClusterConfig, environ=environ or {})
        args = parser.parse_args(["--config", str(file), *flags])
        settled = configuration(args)
        return cluster_plan(args, settled, parser.sources.settings, environ or {})

    return plan


def test_servers_get_the_settings_that_are_given_wherever_they_are_given(planned):
    plan = planned(FILE, "--max-new-tokens", "8", environ={"KESTREL_MAX_HELD_BYTES": "2G"})
    assert (plan.config.replicas, plan.config.max_replicas, plan.config.scales) == (2, 4, True)
    settings = tomllib.loads(plan.task.settings)
    # Neither the cluster's own, nor the address of this machine.
    assert settings == {
        "device": {"device": "cpu"},
        "requests": {"max-queue": 9, "max-new-tokens": 8},
        **{name: table for name, table in settings.items() if "max-held-bytes" in table},
    }
    assert "max-held-bytes" in plan.task.settings
    assert (plan.task.drain_delay_s, plan.task.grace_s, plan.task.ending_s) == (5.0, 30.0, 55.0)


def test_the_version_changes_with_what_servers_get(planned):
    first = planned(FILE).task
    assert planned(FILE).task == first
    assert planned(FILE.replace("replicas = 2", "replicas = 3")).task.version == first.version
    assert planned(FILE, "--max-queue", "8").task.version != first.version
    assert planned(FILE, "--replica-port", "50051").task.version != first.version


def test_secrets_stay_where_they_are(planned):
    plan = planned(FILE, environ={"KESTREL_API_KEY": "a-secret-of-16-letters"})
    assert plan.task.secrets == ("KESTREL_API_KEY",) and plan.task.needs_token
    assert "a-secret" not in repr(plan.task)


def test_gpus(planned):
    assert planned(FILE).gpus(True) == 0.0
    assert planned("", "--device", "cuda").gpus(False) == 1.0
    assert [planned("").gpus(has) for has in (True, False)] == [1.0, 0.0]
    assert planned("", "--device", "cuda", "--replica-gpus", "0.5").gpus(True) == 0.5


def test_nodes_that_others_reach_need_protection(planned):
    plan = planned(FILE)
    plan.check_nodes(["127.0.0.1"])
    with pytest.raises(AddressError, match=r"refusing to listen on \[fd00::1\]:0.*insecure-listen"):
        plan.check_nodes(["127.0.0.1", "fd00::1"])
    planned(FILE, "--insecure-listen").check_nodes(["fd00::1"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--workers", "2"), "--workers: a server of a cluster is one process"),
        (("--device", "cuda:1"), "--device=cuda:1: Ray gives each server its GPU; give cuda"),
        (("--metrics-listen", "127.0.0.1:0"), "--metrics-listen: servers on one node cannot share"),
        (("--http-listen", "127.0.0.1:8080"), "--http-listen: servers on one node cannot share"),
        (("--model", "moondream22"), "moondream22"),
        (("--max-replicas", "1"), "--max-replicas=1: must be at least --replicas, 2"),
        (("--replica-gpus", "2"), "--replica-gpus=2.0: "),
        (("--target-utilization", "0"), "--target-utilization=0.0: "),
    ],
)
def test_settings_that_cannot_be(planned, flags, message):
    with pytest.raises(SettingsError) as caught:
        planned(FILE, *flags)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[cluster]\nreplica = 2\n", "cluster.replica: unknown key; did you mean replicas?"),
        ("[cluster]\nreplicas = 0\n", "kestrel.toml:cluster.replicas=0: "),
        ("[cluster]\nreplicas = 'two'\n", "kestrel.toml:cluster.replicas='two': must be a whole"),
        ("[cluster]\napplication = 'A/b'\n", "must be 1 to 63 lower-case letters"),
        ("[cluster]\ndirectory-listen = 'unix:/x'\n", "must be HOST:PORT"),
        ("replicas = 2\n", "it belongs in [cluster]"),
    ],
)
def test_mistakes_in_the_file(tmp_path, text, message):
    (file := tmp_path / "kestrel.toml").write_text(text)
    done = here("cluster", "--config", file)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kestrel-grpc cluster: error: ") and message in done.stderr


def test_serve_accepts_the_section_of_a_cluster(tmp_path):
    (file := tmp_path / "kestrel.toml").write_text(FILE.replace("0.0.0.0", "127.0.0.1"))
    assert here("serve", "--config", file, "--print-config").returncode == 0


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kestrel_grpc.cluster.on_ray", raising=False)
    done = here("cluster", "--insecure-listen")
    assert done.returncode == 1
    assert "needs Ray, and the package ray is missing; run pip install" in done.stderr


def test_status_and_follow_need_a_directory(tmp_path):
    done = here("cluster", "status", "--directory", "http://127.0.0.1:1/kestrel")
    assert done.returncode == 1 and "http://127.0.0.1:1/kestrel: " in done.stderr
    done = here("cluster", "follow")
    assert done.returncode == 1 and "follow needs --front" in done.stderr
    done = here("cluster", "stauts")
    assert done.returncode == 2 and "did you mean status?" in done.stderr


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--directory", "ftp://host/x", "--addresses-file", "a"), "must be http://HOST:PORT/NAME"),
        (("--endpoints-file", "/nowhere/eds.json"), "--endpoints-file=.*/nowhere does not exist"),
        (("--front", "--listen", "0.0.0.0:50051"), "refusing to listen on 0.0.0.0:50051"),
    ],
)
def test_follow_refuses_what_cannot_work(flags, message):
    done = here("cluster", "follow", *flags)
    assert done.returncode == 1 and re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
