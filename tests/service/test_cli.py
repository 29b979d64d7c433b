"""The command line, as users run it: subprocesses, a served checkpoint, exit statuses, nothing left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from kestrel_grpc import __version__

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "kestrel_grpc"]
READY = re.compile(
    r"^kestrel-grpc ready: (\S+) on cpu \(float32\), listening on (.+), loaded in [\d.]+ s$"
)


def environment(**variables):
    """Ours, less the variables that would change defaults; torch on one thread."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KESTREL_")}
    return {**inherited, "KESTREL_THREADS": "1", **variables}


def kestrel(*arguments, stdin=None, **variables):
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=not isinstance(stdin, bytes),
        timeout=120,
        cwd=ROOT,
        env=environment(**variables),
    )


class Process:
    """A ``serve`` process; ``started`` waits for its ready line."""

    def __init__(self, log, *arguments):
        self.log = log
        with log.open("wb") as errors:
            self.popen = subprocess.Popen(
                [*PROGRAM, "serve", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(),
            )

    def started(self):
        self.ready = self.popen.stdout.readline().strip()
        assert self.ready, self.log.read_text()
        return self

    def signal(self, number):
        self.popen.send_signal(number)

    def wait(self, timeout=30):
        try:
            return self.popen.wait(timeout)
        finally:
            self.popen.stdout.close()

    def kill(self):
        if self.popen.poll() is None:
            self.popen.kill()
            self.wait()
        self.popen.stdout.close()


@pytest.fixture(scope="module")
def checkpoint(golden_folder):
    return golden_folder("md3")


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """One server for the whole module, on TCP and on a unix socket; yields (TCP address, socket's address)."""
    folder = tmp_path_factory.mktemp("served")
    socket = f"unix:{folder}/kestrel.sock"
    arguments = ["--weights", checkpoint, "--listen", "127.0.0.1:0", "--listen", socket]
    process = Process(folder / "log", *arguments, "--access-log", "json").started()
    name, addresses = READY.match(process.ready).groups()
    assert name == checkpoint.name
    tcp, unix = addresses.split(", ")
    assert unix == socket
    yield tcp, unix
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not Path(socket.removeprefix("unix:")).exists()
    log = process.log.read_text()
    assert "Traceback" not in log
    assert '"code": "OK"' in log


@pytest.fixture(scope="module")
def picture(golden_images):
    return golden_images / "gray_640x480.png"


def ask(server, *arguments, **options):
    return kestrel(*arguments, "--server", server[0], **options)


def test_a_question_is_answered(server, picture):
    done = ask(server, "query", picture, "what?", "--max-tokens", 8, "--temperature", 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "limit" in done.stderr
    streamed = ask(
        server, "query", picture, "what?", "--max-tokens", 8, "--temperature", 0, "--stream"
    )
    assert streamed.stdout == done.stdout
    described = json.loads(
        ask(
            server, "query", picture, "what?", "--max-tokens", 8, "--temperature", 0, "--json"
        ).stdout
    )
    assert described["answer"] == done.stdout.removesuffix("\n")
    assert described["usage"]["output_tokens"] == 8
    assert described["image_size"] == {"width": 640, "height": 480}


def test_a_question_without_a_picture_over_a_unix_socket(server):
    done = kestrel("query", "what?", "--max-tokens", 3, "--server", server[1])
    assert done.returncode == 0, done.stderr


def test_a_picture_may_come_from_standard_input(server, picture):
    named = ask(
        server, "caption", picture, "--length", "short", "--max-tokens", 4, "--temperature", 0
    )
    piped = ask(
        server, "caption", "-", "--length", "short", "--max-tokens", 4, "--temperature", 0,
        stdin=picture.read_bytes(),
    )  # fmt: skip
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout.decode() == named.stdout != ""


def test_objects_are_printed_one_a_line_and_painted(server, picture, tmp_path):
    painted = tmp_path / "boxes.png"
    done = ask(server, "detect", picture, "cat", "--max-objects", 3, "--save", painted)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        assert re.fullmatch(r"([01]\.\d{4} ){3}[01]\.\d{4}  \((\d+, ){3}\d+ px\)", line)
    with Image.open(painted) as image:
        assert image.size == (640, 480)
    events = ask(server, "point", picture, "cat", "--max-objects", 2, "--stream", "--json")
    *points, final = map(json.loads, events.stdout.splitlines())
    assert [event["point"] for event in points] == final["final"]["points"]


def test_an_outline_and_its_mask(server, picture):
    done = ask(server, "segment", picture, "cat", "--json", "--mask", "svg", "--max-tokens", 30)
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert described["object"] == "cat"
    assert {"svg_path", "box", "mask"} <= described.keys()


def test_models_and_health(server, checkpoint):
    done = ask(server, "models")
    assert done.stdout.startswith(f"{checkpoint.name}: ready\n")
    assert "segment" in done.stdout
    described = json.loads(ask(server, "models", "--json").stdout)
    assert described["models"][0]["name"] == checkpoint.name
    assert described["server"]["device"] == "cpu"
    assert described["server"]["dtype"] == "float32"
    done = ask(server, "health")
    assert (done.returncode, done.stdout) == (0, "SERVING\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["detect", "{picture}", " "], "object: must not be empty [INVALID_ARGUMENT]"),
        (["query", "hi", "--model", "gpt"], "'gpt' is not served"),
        (["query", "hi", "--max-tokens", "0"], "sampling.max_tokens"),
        (["caption", "nowhere.jpg"], "there is no picture 'nowhere.jpg'"),
        (["caption", "{text}"], "not in a supported format"),
        (
            ["detect", "{picture}", "cat", "--max-objects", "1", "--save", "/absent/x.png"],
            "can't write",
        ),
        (
            ["detect", "{picture}", "cat", "--max-objects", "1", "--save", "x.unknown"],
            "can't write",
        ),
    ],
)
def test_failures_are_one_line_and_status_1(server, picture, arguments, words):
    named = [a.format(picture=picture, text=__file__) for a in arguments]
    done = ask(server, *named)
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if "limit was reached" not in line]
    assert error.startswith(f"kestrel-grpc {arguments[0]}: error: ")
    assert words in error


def test_without_a_server_the_address_is_named():
    done = kestrel("query", "hi", "--server", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "serve" in done.stderr
    assert done.stderr.count("\n") == 1
    done = kestrel("health", "--wait", "0.2", KESTREL_SERVER="127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")


def test_help_and_version():
    done = kestrel("--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = kestrel("serve", "--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = kestrel("serve", "--help")
    assert "KESTREL_MAX_BATCH_SIZE" in done.stdout
    assert done.returncode == 0


def test_client_commands_load_neither_torch_nor_the_engine():
    code = (
        "import sys\nfrom kestrel_grpc.cli.parser import main\n"
        "main(['query', 'hi', '--server', '127.0.0.1:1', '--timeout', '1'])\n"
        "print(*{'torch', 'numpy', 'pyvips', 'kestrel_engine'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "", done.stderr


def test_schedule_answers_in_this_process(checkpoint, picture):
    done = kestrel(
        "schedule", "what is it?", "and this?", "--image", picture, "--weights", checkpoint,
        "--max-tokens", 5, "--temperature", 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "what is it?" in done.stdout
    assert re.search(
        r"first token \d+ ms .*prefill \d+ of \d+ positions.*decode 5 tokens at [\d.]+/s",
        done.stdout,
    )
    assert re.search(r"2 prompts in [\d.]+ s: 10 tokens", done.stdout)


def test_schedule_streams(checkpoint):
    done = kestrel(
        "schedule", "hi", "--stream", "--weights", checkpoint, "--max-tokens", 5, "--temperature", 0
    )
    assert done.returncode == 0, done.stderr
    described = kestrel(
        "schedule", "hi", "--json", "--weights", checkpoint, "--max-tokens", 5, "--temperature", 0
    )
    (line,) = described.stdout.splitlines()
    result = json.loads(line)
    assert result["output"]["answer"] in done.stdout
    assert result["metrics"]["output_tokens"] == len(result["token_ids"]) == 5


def test_schedule_fails_on_a_bad_picture(checkpoint):
    done = kestrel("schedule", "hi", "--image", "nowhere.jpg", "--weights", checkpoint)
    assert done.returncode == 1
    assert "prompt 1: image" in done.stderr
    done = kestrel("schedule", "a", "b", "c", "--image", "x", "--image", "y")
    assert done.returncode == 2
    assert "2 pictures for 3 prompts" in done.stderr


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--weights", "/absent"], 2, "--weights=/absent"),
        (["--max-batch-size", "-3"], 2, "--max-batch-size=-3"),
        (["--listen", "unix:/absent/k.sock"], 1, "cannot listen on unix:/absent/k.sock"),
    ],
)
def test_a_server_that_cannot_start_says_why(flags, status, words):
    done = kestrel("serve", "--listen", "127.0.0.1:0", *flags)
    assert done.returncode == status
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kestrel-grpc serve: error: ")
    assert words in last
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout


def test_a_port_in_use_is_named(server):
    done = kestrel("serve", "--listen", server[0])
    assert done.returncode == 1
    assert f"cannot listen on {server[0]}: address already in use" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_the_server(checkpoint, tmp_path, number):
    process = Process(
        tmp_path / "log", "--weights", checkpoint, "--listen", f"unix:{tmp_path}/k.sock"
    )
    try:
        while "listening" not in process.log.read_text():
            assert process.popen.poll() is None, process.log.read_text()
            time.sleep(0.01)
        process.signal(number)
        assert process.wait() == 0
    finally:
        process.kill()
    assert not (tmp_path / "k.sock").exists()


def test_a_second_signal_ends_the_server_at_once(checkpoint, tmp_path):
    socket = f"unix:{tmp_path}/k.sock"
    process = Process(tmp_path / "log", "--weights", checkpoint, "--listen", socket).started()
    client = subprocess.Popen(
        [*PROGRAM, "detect", "tests/data/goldens/images/wide_900x600.jpg", "cat", "--server", socket,
         "--max-objects", "600", "--temperature", "5", "--stream"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    try:
        assert client.stdout.readline(), client.stderr.read()
        process.signal(signal.SIGTERM)
        while "SIGTERM" not in process.log.read_text():
            time.sleep(0.01)
        process.signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 128 + signal.SIGTERM
        assert client.wait(timeout=20) == 1
        assert "unavailable" in client.stderr.read()
    finally:
        process.kill()
        client.kill()
        client.communicate()
    assert not (tmp_path / "k.sock").exists()


def test_the_demo_calls_everything_and_leaves_no_process(checkpoint, tmp_path):
    short = {"KESTREL_DEFAULT_MAX_TOKENS": "8"}
    done = kestrel("demo", "--model", checkpoint, "--output", tmp_path / "out", **short)
    for skill in ("query", "caption", "point", "detect", "segment"):
        assert f"\n{skill}: " in done.stdout, done.stderr
    assert "ANOTHER" not in done.stdout
    assert (tmp_path / "out" / "detect.png").exists()
    ours = [
        p for p in psutil.Process().children(recursive=True) if "demo.sock" in " ".join(p.cmdline())
    ]
    assert ours == []
