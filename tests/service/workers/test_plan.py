"""Flags of several processes, and what each worker is to do."""

import pickle
import socket
import sys

import pytest

from kestrel_engine import RuntimeConfig
from kestrel_engine.processes import Line
from kestrel_grpc.settings.addresses import AddressError
from kestrel_grpc.settings.configuration import (
    add_flags,
    configuration,
    print_configuration,
)
from kestrel_grpc.settings.flags import Parser, SettingsError
from kestrel_grpc.settings.security import SecurityConfig, TlsFiles
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.settings.workers import WorkersConfig
from kestrel_grpc.workers import plan
from kestrel_grpc.workers.line import Alive, Failed, Ready, WorkerEnd, decode, send_task
from kestrel_grpc.workers.plan import plan_workers, shared_addresses
from kestrel_grpc.workers.port import HeldPorts
from kestrel_grpc.workers.restarts import MOST_DELAY_S, WINDOW_S, Restarts
from tests.service.settings.test_settings import configs


def workers(*flags, **environ):
    return configs(*flags, **environ)[0].workers


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """16 processors, two GPUs."""
    monkeypatch.setattr(plan, "processors", lambda: 16)
    monkeypatch.setattr(plan, "count_cuda_devices", lambda: 2)


def planned(*flags, environ=None, shared=("127.0.0.1:7000",)):
    server, runtime = configs(*flags)
    return plan_workers(server, runtime, shared, environ or {})


def test_by_default_one_process_serves():
    assert workers() == WorkersConfig()
    assert workers().count == workers("--workers", "1").count == 1
    assert workers("--devices", "cuda:3").count == 1


def test_flags_of_workers():
    assert workers("--devices", "cuda:0, cuda:2").count == 2
    found = workers("--workers", "2", "--worker-listen", "unix:/run/w{index}.sock")
    assert [found.own_address(i) for i in (0, 1)] == ["unix:/run/w0.sock", "unix:/run/w1.sock"]
    found = workers("--workers", "3", "--worker-listen", "[::1]:7000", "--worker-restarts", "0")
    assert found.own_address(2) == "[::1]:7002" and found.restarts == 0
    assert workers("--worker-listen", "127.0.0.1:0").own_address(1) == "127.0.0.1:0"
    assert workers(KESTREL_WORKERS="2", KESTREL_DEVICES="cpu,cpu").devices == ("cpu", "cpu")


def test_what_is_printed_can_be_fed_back(tmp_path):
    flags = ["--devices", "cuda:0, cuda:1", "--worker-listen", "unix:/run/{index}"]

    def settle(*given):
        parser = Parser(prog="test")
        add_flags(parser, {})
        args = parser.parse_args(given)
        return print_configuration(parser.sources.settings, args, {}), configuration(args)

    printed, meant = settle(*flags)
    file = tmp_path / "kestrel.toml"
    file.write_text(printed)
    assert settle("--config", str(file))[1] == meant
    assert meant.server.workers.devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], r"--workers=0: must be a whole number from 1 to 64"),
        (["--workers", "3", "--devices", "cpu,cpu"], r"--workers=3: .* --devices names 2"),
        (["--devices", "cpu,cpu", "--device", "cpu"], r"--devices and --device: give only one"),
        (["--worker-restarts", "-1"], r"--worker-restarts=-1: must be a whole number from 0"),
        (["--devices", "cuda:0,cuda:0"], r"--devices=cuda:0,cuda:0: cuda:0 is named twice"),
        (
            ["--workers", "9", "--worker-listen", "h:65530"],
            r"--worker-listen=h:65530: address of worker 8",
        ),
    ],
)
def test_wrong_flags_are_named(flags, message):
    with pytest.raises(SettingsError, match=message):
        configs(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--devices", "cuda"],
        ["--devices", "tpu:0"],
        ["--worker-listen", "unix:/run/w.sock"],
        ["--worker-listen", "h{index}:7000"],
        ["--worker-listen", "7000"],
    ],
)
def test_what_is_no_device_or_pattern_is_refused(flags, capsys):
    with pytest.raises(SystemExit):
        configs(*flags)
    assert flags[0] in capsys.readouterr().err


def test_each_worker_sees_its_own_gpu_alone():
    tasks = planned("--workers", "2", "--device", "cuda")
    assert [task.device for task in tasks] == ["cuda:0", "cuda:1"]
    assert [task.environ["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["0", "1"]
    assert {task.runtime.device for task in tasks} == {"cuda"}
    tasks = planned("--devices", "cuda:1,cuda:0", environ={"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"})
    assert [task.environ["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["GPU-b", "GPU-a"]
    assert [task.device for task in planned("--workers", "2")] == ["cuda:0", "cuda:1"], "auto"


def test_gpus_that_there_are_not_are_named():
    with pytest.raises(SettingsError, match=r"--workers=3: .* this machine has 2"):
        planned("--workers", "3", "--device", "cuda")
    with pytest.raises(SettingsError, match=r"--device=cuda:1: 2 workers need one device each"):
        planned("--workers", "2", "--device", "cuda:1")
    with pytest.raises(SettingsError, match=r"cuda:1: CUDA_VISIBLE_DEVICES='3' allows only 1"):
        planned("--devices", "cuda:0,cuda:1", environ={"CUDA_VISIBLE_DEVICES": "3"})


def test_without_a_gpu_all_compute_on_the_processors(monkeypatch):
    monkeypatch.setattr(plan, "count_cuda_devices", lambda: 0)
    tasks = planned("--workers", "4")
    assert {(task.device, task.runtime.device) for task in tasks} == {("cpu", "cpu")}
    assert "CUDA_VISIBLE_DEVICES" not in tasks[0].environ


def test_processors_are_shared_where_nobody_says_how():
    for task in planned("--workers", "2", "--device", "cuda"):
        assert task.runtime.cpu_threads == 8
        assert 2 <= task.runtime.preprocess_threads <= 6
    given = planned(
        "--workers", "2", "--device", "cpu", "--threads", "3", "--preprocess-threads", "5"
    )
    assert {(t.runtime.cpu_threads, t.runtime.preprocess_threads) for t in given} == {(3, 5)}


def test_addresses_of_workers():
    pytest.importorskip("prometheus_client")
    flags = [
        *("--workers", "2", "--device", "cpu", "--listen", "127.0.0.1:7000,unix:/run/k.sock"),
        *("--worker-listen", "127.0.0.1:7100", "--metrics-listen", "127.0.0.1:9464"),
    ]
    first, second = planned(*flags)
    assert first.server.shared_listen == second.server.shared_listen == ("127.0.0.1:7000",)
    assert first.server.listen == ("127.0.0.1:7100", "unix:/run/k.sock")
    assert second.server.listen == ("127.0.0.1:7101",)
    assert second.server.telemetry.prometheus == "127.0.0.1:9465"
    assert second.server.telemetry.worker == 1
    plain = planned("--workers", "2", "--device", "cpu")[1].server
    assert plain.listen == () and plain.telemetry.worker == 1, "its logs of usage have its name"


@pytest.mark.skipif(sys.platform != "linux", reason="refused before")
def test_a_unix_socket_alone_cannot_be_shared():
    server = ServerConfig(listen=("unix:/run/k.sock",), workers=WorkersConfig(workers=2))
    with pytest.raises(SettingsError, match=r"--workers=2: needs a TCP address .* --worker-listen"):
        shared_addresses(server)


def test_telemetry_tells_workers_apart_and_systemd_hears_one():
    environ = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_USEC": "1", "HOME": "/root"}
    first, second = planned("--workers", "2", "--device", "cpu", environ=environ)
    host = socket.gethostname()
    attributes = "OTEL_RESOURCE_ATTRIBUTES"
    assert second.environ == {
        "HOME": "/root",
        attributes: f"service.instance.id={host}-1,kestrel.worker=1",
    }
    environ = {attributes: "service.instance.id=pod-7,deployment.environment=test"}
    first, _ = planned("--workers", "2", "--device", "cpu", environ=environ)
    assert first.environ[attributes] == (
        "service.instance.id=pod-7,deployment.environment=test,"
        "service.instance.id=pod-7-0,kestrel.worker=0"
    )
    resources = pytest.importorskip("opentelemetry.sdk.resources")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(attributes, first.environ[attributes])
        found = resources.OTELResourceDetector().detect().attributes
    assert found["service.instance.id"] == "pod-7-0", "the last of two holds"


def test_a_task_crosses_to_its_worker_and_messages_come_back():
    server = ServerConfig(
        security=SecurityConfig(tls=TlsFiles(certificate="c", private_key="k"), api_key="secret"),
        telemetry=TelemetryConfig(prometheus="127.0.0.1:0"),
    )
    [task] = plan_workers(server, RuntimeConfig(device="cpu"), (), {"SECRET": "of the environment"})
    assert "secret" not in repr(task) and "of the environment" not in repr(task)
    ours, theirs = socket.socketpair()
    supervisor = Line(ours, trusts=True)
    send_task(supervisor, task)
    worker = WorkerEnd(theirs.detach())
    received = worker.task()
    assert (received.server, received.runtime) == (task.server, task.runtime)
    assert received.environ == {}, "it has it already"
    assert len(pickle.dumps(task)) < 75_000, "a socket takes it at once"
    told = [Alive(), Ready("m", "", "d", 1.5, ("a:1", "unix:/b")), Failed("x" * 9000, "f", "v")]
    for message in told:
        worker.send(message)
    assert supervisor.read()
    heard = [decode(message) for message in supervisor.messages()]
    assert heard == [*told[:2], Failed("x" * 8000, "f", "v")]
    assert str(told[2]).startswith("f=v: x") and str(Failed("y")) == "y"
    assert not worker.has_ended()
    supervisor.close()
    assert worker.has_ended()
    worker.send(Alive())
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads on Linux")
def test_held_ports_are_ours_and_get_no_connections():
    with HeldPorts(("127.0.0.1:0", "localhost:0")) as held:
        assert all(not address.endswith(":0") for address in held.addresses)
        port = int(held.addresses[0].rpartition(":")[2])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(AddressError, match="address already in use"):
            HeldPorts(held.addresses[:1])
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            socket.create_connection(("127.0.0.1", port)).close()
    HeldPorts(held.addresses).close()


@pytest.mark.skipif(sys.platform != "linux", reason="SO_REUSEPORT spreads on Linux")
def test_a_port_can_be_held_while_old_connections_linger():
    with socket.create_server(("127.0.0.1", 0)) as old:
        port = old.getsockname()[1]
        caller = socket.create_connection(("127.0.0.1", port))
        accepted, _ = old.accept()
        accepted.close()  # Who closes first waits.
        caller.close()
    with HeldPorts((f"127.0.0.1:{port}",)) as held:
        assert held.addresses == (f"127.0.0.1:{port}",)


def test_restarts_take_longer_each_time_and_end():
    restarts = Restarts(3)
    assert [restarts.next_delay(t) for t in (0, 1, 2, 3)] == [0.5, 1.0, 2.0, None]
    assert restarts.next_delay(WINDOW_S) == 0.5, "the first is forgotten"
    assert Restarts(0).next_delay(0.0) is None
    calm = Restarts(1000)
    ends = (0.0, 10.4, 21.3, 32.0, 47.0, 48.0)
    assert [calm.next_delay(t) for t in ends] == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0]
    many = Restarts(1000)
    assert max(many.next_delay(0.0) for _ in range(1000)) == MOST_DELAY_S
