"""What ``doctor`` says of packages, addresses, secrets and variables; and the command itself."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kestrel_engine import RuntimeConfig
from kestrel_grpc.cli.operation import doctor_checks as doctor
from kestrel_grpc.settings.configuration import known_settings
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.security import SecurityConfig, TlsFiles
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from kestrel_grpc.settings.workers import WorkersConfig
from tests.service.command_line import here

ROOT = Path(__file__).parents[3]


def one(findings):
    (finding,) = findings
    return finding


def test_what_is_installed_here_fits():
    told = one(doctor.check_packages())
    assert told.status == "ok", told
    assert "grpcio " in told.message and "protobuf " in told.message


@pytest.mark.parametrize(
    ("line", "extra", "told"),
    [
        ("grpcio>=1", False, None),
        ("grpcio>=99", False, "not >=99"),
        ("not-there>=1", False, "not-there is not installed"),
        ("not-there>=1; extra == 'gpu'", True, None),
        ("grpcio>=99; sys_platform == 'nowhere'", False, None),
    ],
)
def test_a_package_that_does_not_fit(line, extra, told):
    found = doctor.version_problem(Requirement(line), extra)
    assert (found is None) if told is None else (told in found)


def test_addresses_in_use_and_exposed():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        config = ServerConfig(
            listen=(taken,),
            http=HttpConfig(http_listen=(taken,)),
            telemetry=TelemetryConfig(prometheus=taken),
        )
        listen, http, metrics = doctor.check_addresses(config)
        assert (listen.status, http.status, metrics.status) == ("fail", "fail", "fail")
        assert "--listen" in listen.remedy and "address already in use" in listen.message
    assert one(doctor.check_addresses(ServerConfig(listen=(taken,)))).status == "ok"
    exposure, _ = doctor.check_addresses(ServerConfig(listen=("0.0.0.0:0",)))
    assert (exposure.check, exposure.status) == ("exposure", "fail")


@pytest.mark.parametrize(
    "flag",
    [
        ("--precision", "fp8"),
        ("--attention", "triton"),
        ("--adapters-dir", "/nonexistent"),
        ("--calibration", "/nonexistent"),
        ("--audit-log", "/nonexistent/file"),
        ("--batches", "/nonexistent/file"),
        ("--batches", "/dev"),
        ("--batches", "{text}"),
        ("--token-budget", "file=/nonexistent/file", "minute=1,"),
        ("--token-budget", "file={text}", "minute=1,"),
        ("--adapter-api-key-file", "/nonexistent"),
        ("--shared-images-password-file", "/nonexistent"),
        ("--shared-images-ca", "/nonexistent"),
        ("--shared-images-key-file", "/nonexistent"),
        ("--weights", "'/nonexistent'"),
        ("--tokenizer", "'/nonexistent'"),
        ("--refiner", "'/nonexistent'"),
    ],
)
def test_what_serve_would_refuse_fails(flag, tmp_path):
    """The third text is the value's begin, which the message leaves out."""
    text = tmp_path / "text"
    text.write_text("not a database")
    name, value, *begin = (each.format(text=text) for each in flag)
    others = ("--shared-images", "rediss://127.0.0.1:1/") if name.startswith("--shared") else ()
    typed = "".join(begin) + value.strip("'")
    done = here("doctor", "--device", "cpu", "--json", name, typed, *others)
    failed = [f["message"] for f in json.loads(done.stdout) if f["status"] == "fail"]
    assert done.returncode == 1
    assert [each.partition(":")[0] for each in failed] == [f"{name}={value}"]
    assert [*tmp_path.iterdir()] == [text]


def test_files_of_the_server_that_can_be_used(tmp_path):
    flags = ("--batches", tmp_path / "new", "--model-folders", "/nonexistent")
    done = here("doctor", "--device", "cpu", "--json", *flags)
    found = {f["message"]: f["status"] for f in json.loads(done.stdout) if f["check"] == "files"}
    folder = "--model-folders=/nonexistent: there is no such folder"
    assert found == {f"{tmp_path}/new can be used": "ok", folder: "warn"}
    assert not [*tmp_path.iterdir()], (
        "a file of root, who asks doctor, would be refused to the server"
    )


def test_an_audit_log_is_tried_and_not_left(tmp_path):
    """A file of root, who asks doctor, would be refused to the server's user."""
    new, old = tmp_path / "new", tmp_path / "old"
    old.touch()
    assert [doctor.check_audit_log(str(path)).status for path in (new, old)] == ["ok", "ok"]
    assert [*tmp_path.iterdir()] == [old]


def test_what_several_workers_need():
    alone, several = ServerConfig(), WorkersConfig(workers=2, listen="127.0.0.1:0")
    runtime = RuntimeConfig(device="cpu")
    assert doctor.check_workers(alone, runtime).message == "one process serves"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = ServerConfig(
            listen=("127.0.0.1:0",),
            workers=WorkersConfig(workers=2, listen=f"127.0.0.1:{port - 1}"),
            telemetry=TelemetryConfig(prometheus="127.0.0.1:0"),
        )
        found = [(f.status, f.remedy) for f in doctor.check_addresses(config)]
    assert len(found) == 5 and found[2][0] == "fail" and "--worker-listen" in found[2][1]
    if sys.platform != "linux":
        return
    told = doctor.check_workers(ServerConfig(workers=several), runtime)
    assert told.message == "2 processes share 127.0.0.1:50051, on cpu, cpu"
    one_gpu = RuntimeConfig(device="cuda:1")
    told = doctor.check_workers(ServerConfig(workers=several), one_gpu)
    assert told.status == "fail" and "--device=cuda:1" in told.message


def test_certificates_and_tokens_that_cannot_be_used(tmp_path):
    broken = SecurityConfig(
        tls=TlsFiles(certificate="/nowhere", private_key="/nowhere"),
        auth_tokens=str(tmp_path / "none"),
    )
    assert [(f.check, f.status) for f in doctor.check_security(broken)] == [
        ("tls", "fail"),
        ("callers", "fail"),
    ]
    keyed = one(doctor.check_security(SecurityConfig(api_key="k" * 40)))
    assert keyed.status == "ok" and "k" * 40 not in keyed.message


def test_a_port_for_metrics_that_would_not_be_served(tmp_path):
    def told(address, **security):
        config = ServerConfig(
            listen=(f"unix:{tmp_path}/s",),
            telemetry=TelemetryConfig(prometheus=address),
            security=SecurityConfig(**security),
        )
        found = [f for f in doctor.check_addresses(config) if f.status != "ok"]
        return [(f.check, f.status, f.message) for f in found]

    assert told("127.0.0.1:0") == []
    [(check, status, message)] = told("0.0.0.0:0")
    assert (check, status) == ("metrics", "fail") and "--metrics-tls" in message
    assert told("0.0.0.0:0", insecure_listen=True) == []
    assert told("127.0.0.1:0", auth_tokens=str(tmp_path / "none")) == [], "told of with the callers"


def test_skills_and_telemetry():
    assert doctor.check_skills(()).status == "ok"
    assert doctor.check_skills(("nowhere:Nothing",)).status == "fail"
    assert doctor.check_telemetry(ServerConfig()).message == "off"
    traced = ServerConfig(telemetry=TelemetryConfig(traces=("otlp",)))
    assert doctor.check_telemetry(traced).message == "traces by otlp"


def test_packages_that_telemetry_lacks(monkeypatch):
    monkeypatch.setattr(doctor, "missing_packages", lambda _: ("opentelemetry.sdk",))
    assert doctor.check_telemetry(ServerConfig()).status == "warn"


def test_variables_that_are_none_of_ours():
    ours = {"KESTREL_WEIGHTS": "/a", "KESTREL_SERVER": "a:1", "KESTREL_SERVICE_PORT_GRPC": "1"}
    assert doctor.check_variables(known_settings(), ours).status == "ok"
    told = doctor.check_variables(known_settings(), {"KESTREL_MAX_BACH_SIZE": "9"})
    assert told.status == "warn" and "did you mean KESTREL_MAX_BATCH_SIZE?" in told.message


def run(*flags, **environ):
    return subprocess.run(
        [sys.executable, "-m", "kestrel_grpc", "doctor", *flags],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **environ},
    )  # fmt: skip


def test_a_machine_that_can_serve_ends_with_0(tmp_path):
    done = here("doctor", "--json", "--listen", f"unix:{tmp_path}/a", "--device", "cpu")
    assert done.returncode == 0, done.stdout
    told = json.loads(done.stdout)
    assert {"settings", "torch", "images", "model", "memory", "packages"} <= {
        f["check"] for f in told
    }
    assert all(f["status"] in ("ok", "warn") for f in told)
    assert all(f["remedy"] for f in told if f["status"] == "warn")


def test_one_that_cannot_ends_with_1_and_remedies(tmp_path):
    file = tmp_path / "kestrel.toml"
    file.write_text('[model]\nmodel = "moondream2"\noffline = true\n[device]\ndevice = "cpu"\n')
    done = here(
        "doctor",
        "--config",
        str(file),
        HF_HOME=str(tmp_path / "empty"),
        KESTREL_MODEL="",
        KESTREL_API_KEY="s3cret" * 9,
    )
    assert done.returncode == 1
    assert "FAIL  model: moondream2 isn't in the hub's cache, and --offline" in done.stdout
    assert "\n      -> kestrel-grpc download moondream2\n" in done.stdout
    assert "of " in done.stderr and "checks failed" in done.stderr
    assert "s3cret" not in done.stdout + done.stderr


def test_a_library_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "pyvips.py").write_text("raise OSError('libvips.so.42: cannot open')\n")
    done = run(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "a package cannot be imported: libvips.so.42: cannot open" in done.stderr
