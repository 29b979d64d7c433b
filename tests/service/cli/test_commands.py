"""The command line: a served checkpoint, exit statuses, nothing left behind.

A command of each kind is started as users start it, and so are servers in slow tests. Other servers and commands are
forks, which start within milliseconds, or run in this process.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import psutil
import pytest
from PIL import Image

from kestrel_grpc import __version__
from kestrel_grpc.cli import own_server
from tests.forking.process import ForkedProcess
from tests.service.command_line import PROGRAM, ROOT, environment, executed, here, kestrel

IMAGE = ROOT / "kestrel_grpc/cli/demo.jpg"
READY = re.compile(
    r"^kestrel-grpc ready: (\S+) on cpu \(float32\), listening on (.+), loaded in [\d.]+ s$"
)


class Process:
    """A ``serve`` process; ``started`` waits for its ready line. ``start``: ForkedProcess or subprocess.Popen."""

    def __init__(self, log, *arguments, start=ForkedProcess):
        self.log = log
        with log.open("wb") as errors:
            self.popen = start(
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
def server(tmp_path_factory):
    """The default model, served on TCP and on a unix socket; yields (TCP address, socket's address)."""
    folder = tmp_path_factory.mktemp("served")
    socket = f"unix:{folder}/kestrel.sock"
    arguments = ["--listen", "127.0.0.1:0", "--listen", socket, "--access-log", "json"]
    process = Process(folder / "log", *arguments).started()
    name, addresses = READY.match(process.ready).groups()
    assert name == "kestrel-tiny"
    tcp, unix = addresses.split(", ")
    assert unix == socket
    yield tcp, unix
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not Path(socket.removeprefix("unix:")).exists()
    log = process.log.read_text()
    assert "Traceback" not in log
    assert '"code": "OK"' in log


CRESCENTS = [(0.440, 0.588, 0.642, 0.869), (0.812, 0.156, 0.989, 0.303)]
"""Where the image's two green crescents are, as fractions."""


def ask(server, *arguments, run=here, **options):
    return run(*arguments, "--server", server[0], **options)


def test_a_question_is_answered(server):
    question = ["query", IMAGE, "How many green crescents are there?", "--temperature", 0]
    done = ask(server, *question, run=executed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n"
    assert ask(server, *question, "--stream").stdout == "2\n"
    described = json.loads(ask(server, *question, "--json").stdout)
    assert described["answer"] == "2"
    assert described["model"] == "kestrel-tiny"
    assert described["image_size"] == {"width": 857, "height": 783}
    thought = json.loads(ask(server, *question, "--reasoning", "--json").stdout)
    assert thought["answer"] == "2"
    points = [point for span in thought["reasoning"]["grounding"] for point in span["points"]]
    assert len(points) == 2


def test_a_question_without_a_image_over_a_unix_socket(server):
    done = here("query", "what?", "--max-tokens", 3, "--server", server[1])
    assert done.returncode == 0, done.stderr


def test_a_image_may_come_from_standard_input(server):
    flags = ["--length", "short", "--temperature", 0]
    named = ask(server, "caption", IMAGE, *flags)
    piped = ask(server, "caption", "-", *flags, run=kestrel, stdin=IMAGE.read_bytes())
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == named.stdout
    assert "two green crescents" in named.stdout


def test_analyze_omits_what_has_a_low_score(server):
    words = ["analyze", IMAGE, "--query", "How many shapes?", "--detect", "shape", "--json"]
    every = json.loads(ask(server, *words).stdout)["tasks"]["1"]["objects"]
    limit = sorted(box["score"] for box in every)[1]
    kept = json.loads(ask(server, *words, "--min-score", limit).stdout)["tasks"]["1"]["objects"]
    assert 0 < len(kept) < len(every)
    assert kept == [box for box in every if box["score"] >= limit]


def test_regions_and_tiles(server):
    whole = ask(server, "detect", IMAGE, "green crescent", "--json")
    boxes = json.loads(whole.stdout)["objects"]
    left = min(boxes, key=lambda box: box["x_min"])
    middle = sum(box["x_min"] + box["x_max"] for box in boxes) / 4
    region = ["--region", f"0,0,{middle},1"]
    (seen,) = json.loads(ask(server, "detect", IMAGE, "green crescent", *region, "--json").stdout)[
        "objects"
    ]
    assert seen["x_min"] == pytest.approx(left["x_min"], abs=0.02)
    tiles = ["--tiles", "1x2", "--tile-overlap", 0.4, "--max-overlap", 0.5]
    tiled = json.loads(ask(server, "detect", IMAGE, "green crescent", *tiles, "--json").stdout)
    assert len(tiled["objects"]) == 2
    several = ["--object", "green crescent", "--tiles", "1x2", "--tiles-only", "--min-score", 0.5]
    assert len(ask(server, "point", IMAGE, *several).stdout.splitlines()) == 3
    for flags, why in (
        (["--tile-overlap", 0.2], "--tile-overlap: needs --tiles"),
        (["--tiles", "2"], "must be rows and columns, like 2x3"),
        (["--region", "0,1"], "must be four numbers"),
    ):
        assert why in ask(server, "point", IMAGE, "cat", *flags).stderr


def test_several_objects_are_found_in_one_call(server):
    words = ["detect", IMAGE, "--object", "green crescent", "--object", "red circle"]
    alone = ask(server, "detect", IMAGE, "green crescent").stdout
    done = ask(server, *words)
    assert done.returncode == 0 and "no red circle found" in done.stderr
    assert done.stdout == f"green crescent:\n{alone}red circle:\n"
    streamed = ask(server, *words, "--stream").stdout
    assert sorted(streamed.splitlines()) == sorted(done.stdout.splitlines())
    described = json.loads(ask(server, *words, "--json").stdout)
    assert [len(task["objects"]) for task in described["tasks"].values()] == [2, 0]
    assert list(described["tasks"]) == ["green crescent", "red circle"]
    points = json.loads(ask(server, "point", *words[1:], "--json", "--max-objects", 1).stdout)
    assert len(points["tasks"]["green crescent"]["points"]) == 1
    assert "no image is given" in ask(server, "detect", "--object", "cat").stderr


def test_several_samples_are_printed_with_their_seeds(server):
    words = ["caption", IMAGE, "short", "--temperature", 1.5, "--max-tokens", 8]
    texts = [ask(server, *words, "--seed", seed).stdout for seed in (3, 4, 5)]
    done = ask(server, *words, "--seed", 3, "--samples", 3)
    assert done.stdout == "".join(
        f"seed {n}:\n{text}" for n, text in zip((3, 4, 5), texts, strict=True)
    )
    described = json.loads(ask(server, *words, "--seed", 3, "--samples", 3, "--json").stdout)
    assert [sample["caption"] + "\n" for sample in described["samples"]] == texts
    assert described["caption"] == described["samples"][0]["caption"]
    assert "samples" in ask(server, *words, "--samples", 17).stderr
    assert "leave out --stream" in ask(server, *words, "--samples", 2, "--stream").stderr
    assert "--samples" not in ask(server, "detect", "--help").stdout


def test_an_answer_of_a_given_form(server, tmp_path):
    words = ["query", IMAGE, "How many green crescents are there?", "--temperature", 0]
    done = ask(server, *words, "--choice", "twelve", "--choice", "none", "--choice", "a dozen")
    assert done.stdout.strip() in ("twelve", "none", "a dozen"), done.stderr
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(
        '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false}'
    )
    answer = json.loads(ask(server, *words, "--json-schema", schema, "--max-tokens", 50).stdout)
    assert answer["n"] in (1, 2)
    grammar.write_text('start: "<" /[a-f]{3}/ ">"')
    said = ask(server, *words, "--grammar", grammar, "--stream").stdout.strip()
    assert said[0] + said[-1] == "<>" and len(said) == 5
    assert ask(server, *words, "--regex", "[xyz]").stdout.strip() in "xyz"
    failed = ask(server, *words, "--regex", "(x").stderr
    assert "sampling.constraint.regex: unclosed group at character 1" in failed
    assert "not allowed with" in ask(server, *words, "--regex", "x", "--choice", "y").stderr
    assert "--grammar" in ask(server, *words, "--grammar", tmp_path / "none").stderr
    plain = json.loads(ask(server, *words, "--logprobs", "--json").stdout)
    bias = f"{plain['logprobs']['tokens'][0]['id']}=-100"
    assert ask(server, *words, "--logit-bias", bias).stdout.strip() != plain["answer"].strip()
    assert "like 17=-100" in ask(server, *words, "--logit-bias", "x").stderr
    assert "presence_penalty: 3.0 is not" in ask(server, *words, "--presence-penalty", 3).stderr


def test_log_probabilities_follow_the_answer(server):
    words = ["caption", IMAGE, "short", "--temperature", 0, "--max-tokens", 8]
    text = ask(server, *words).stdout
    done = ask(server, *words, "--logprobs").stdout
    assert done.startswith(text)
    *tokens, last = done.removeprefix(text).splitlines()
    logprobs = [float(line.split()[0]) for line in tokens]
    assert "".join(ast.literal_eval(line[12:]) for line in tokens) == text.rstrip("\n")
    assert float(last.split()[0]) == pytest.approx(sum(logprobs), abs=1e-3) and "a token" in last
    assert ask(server, *words, "--logprobs", "--stream").stdout == done
    described = json.loads(ask(server, *words, "--logprobs", "--json").stdout)
    assert len(described["logprobs"]["tokens"]) == described["usage"]["output_tokens"]
    assert described["logprobs"]["mean"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-3)
    lines = ask(server, *words, "--logprobs", "--json", "--stream").stdout.splitlines()
    told = [token for line in lines for token in json.loads(line).get("tokens", [])]
    assert (
        told
        == json.loads(lines[-1])["final"]["logprobs"]["tokens"]
        == described["logprobs"]["tokens"]
    )
    assert "--logprobs" not in ask(server, "detect", "--help").stdout
    likeliest = ask(server, *words, "--logprobs", "--top-logprobs", 2).stdout
    for line, token in zip(likeliest.removeprefix(text).splitlines(), tokens, strict=False):
        assert line.startswith(token) and line.removeprefix(token).startswith(f"  {token[12:]} ")
        assert len(line.removeprefix(token).split()) >= 4
    assert "set logprobs to true" in ask(server, *words, "--top-logprobs", 2).stderr


def test_stop_strings_end_a_description(server):
    words = ["caption", IMAGE, "short", "--temperature", 0]
    whole = ask(server, *words).stdout.strip()
    assert "two green crescents" in whole
    expected = whole[: whole.index(" green")]
    flags = ["--stop", "not there", "--stop", " green"]
    assert ask(server, *words, *flags).stdout == f"{expected}\n"
    assert ask(server, *words, *flags, "--stream").stdout == f"{expected}\n"
    assert json.loads(ask(server, *words, *flags, "--json").stdout)["finish_reason"] == "stop"
    refused = ask(server, *words, "--stop", "")
    assert refused.returncode != 0 and "sampling.stop[0]: must not be empty" in refused.stderr
    assert "--stop" not in ask(server, "detect", "--help").stdout


def test_a_limit_that_cuts_an_answer_short_is_told(server):
    done = ask(server, "caption", IMAGE, "--max-tokens", 2)
    assert done.returncode == 0
    assert "limit" in done.stderr


def test_objects_are_printed_one_a_line_and_painted(server, tmp_path):
    painted = tmp_path / "boxes.png"
    done = ask(server, "detect", IMAGE, "green crescent", "--save", painted)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line in lines:
        place = r"([01]\.\d{4} ){3}[01]\.\d{4}  \((\d+, ){3}\d+ px\)"
        assert re.fullmatch(place + r"  score [01]\.\d{3}", line)
    boxes = sorted(tuple(map(float, line.split()[:4])) for line in lines)
    assert boxes == [pytest.approx(box, abs=0.03) for box in CRESCENTS]
    with Image.open(painted) as image:
        assert image.size == (857, 783)
    events = ask(server, "point", IMAGE, "green crescent", "--stream", "--json")
    *points, final = map(json.loads, events.stdout.splitlines())
    assert [event["point"] for event in points] == final["final"]["points"]
    for point, (x_min, y_min, x_max, y_max) in zip(
        sorted(final["final"]["points"], key=lambda p: p["x"]), CRESCENTS, strict=True
    ):
        assert x_min < point["x"] < x_max
        assert y_min < point["y"] < y_max


def test_nothing_found_is_told_not_silent(server):
    done = ask(server, "detect", IMAGE, "blue heart")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(r"no blue heart found; absent with probability [01]\.\d{3}\n", done.stderr)


def test_an_outline_and_its_mask(server, tmp_path):
    painted = tmp_path / "star.png"
    done = ask(server, "segment", IMAGE, "pink star", "--json", "--mask", "rle", "--save", painted)
    assert done.returncode == 0, done.stderr
    described = json.loads(done.stdout)
    assert described["svg_path"].startswith("M ")
    assert described["parse_error"] is None
    counts = described["mask"]["rle"]
    assert sum(counts) == 857 * 783
    box = described["box"]
    inside = (box["x_max"] - box["x_min"]) * (box["y_max"] - box["y_min"]) * 857 * 783
    # A five-pointed star fills about a third of its box.
    assert 0.2 < sum(counts[1::2]) / inside < 0.5
    streamed = ask(server, "segment", IMAGE, "pink star", "--stream")
    _, *pieces = streamed.stdout.splitlines()
    assert " ".join(pieces) == described["coarse_path"] != described["svg_path"]
    assert painted.exists()
    coarse = json.loads(ask(server, "segment", IMAGE, "pink star", "--json", "--coarse").stdout)
    assert (coarse["svg_path"], coarse["box"]) == (
        described["coarse_path"],
        described["coarse_box"],
    )
    assert coarse["coarse_path"] is None


def test_models_and_health(server):
    done = ask(server, "models")
    assert done.stdout.startswith("kestrel-tiny: ready\n")
    assert "segment" in done.stdout
    described = json.loads(ask(server, "models", "--json").stdout)
    assert described["models"][0]["name"] == "kestrel-tiny"
    assert described["models"][0]["license"] == "Apache-2.0"
    assert len(described["models"][0]["weights_fingerprint"]) == 64
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
        (["caption", "nowhere.jpg"], "there is no image 'nowhere.jpg'"),
        (["caption", "."], "the folder '.' holds no image"),
        (["caption", "img_gone", "--save", "x.png"], "give its file with --save-on FILE"),
        (["health", "--service", "x"], "has no service 'x'"),
        (["caption", "{text}"], "not in a supported format"),
        (
            ["detect", "{picture}", "pink star", "--save", "/absent/x.png"],
            "cannot write",
        ),
        (
            ["detect", "{picture}", "pink star", "--save", "x.unknown"],
            "cannot write",
        ),
    ],
)
def test_failures_are_one_line_and_status_1(server, arguments, words):
    named = [a.format(picture=IMAGE, text=__file__) for a in arguments]
    done = ask(server, *named)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"kestrel-grpc {arguments[0]}: error: ")
    assert words in error


def test_without_a_server_the_address_is_named():
    done = kestrel("query", "hi", "--server", "127.0.0.1:1", "--timeout", "5")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "serve" in done.stderr
    assert done.stderr.count("\n") == 1
    done = here("health", "--wait", "0.2", KESTREL_SERVER="127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "NOT_SERVING\n")


def test_why_there_is_no_connection_is_told(server):
    done = ask(server, "models", "--tls", "--timeout", "10")
    assert done.returncode == 1
    # gRPC may log before it.
    error = done.stderr.splitlines()[-1]
    assert "do both sides use TLS" in error and "handshake failed" in error
    done = here("models", "--server", "unix:/absent/x.sock", "--timeout", "10")
    assert "No such file" in done.stderr


def test_standard_input_that_is_closed_is_no_image():
    done = subprocess.run(
        ["bash", "-c", '"$@" <&-', "bash", *PROGRAM, "caption", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 1
    assert done.stderr == "kestrel-grpc caption: error: the image is empty: it has 0 bytes\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "token", "x"], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            timeout=60, env=environment(PYTHONUNBUFFERED="1"),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "kestrel-grpc token: error: cannot write: No space left on device\n"


WITHOUT_STREAMS = """
import os, sys
from kestrel_grpc.__main__ import main
os.closerange(0, 3)
for name in ("stdin", "stdout", "stderr"):  # As the interpreter has it that starts without these files.
    setattr(sys, name, None)
    setattr(sys, f"__{name}__", None)
sys.exit(main())
"""


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_server_needs_no_standard_streams(tmp_path, forked):
    address = f"unix:{tmp_path}/s.sock"
    flags = ["serve", "--listen", address]
    if forked:
        command = [sys.executable, "-c", WITHOUT_STREAMS, *flags]
        popen = ForkedProcess(command, cwd=ROOT, env=environment())
    else:
        command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *PROGRAM, *flags]
        popen = subprocess.Popen(command, cwd=ROOT, env=environment())
    try:
        done = kestrel("health", "--wait", 60, "--server", address)
        assert (done.returncode, done.stdout) == (0, "SERVING\n")
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(30) == 0
    finally:
        popen.kill()
        popen.wait()


def test_help_and_version():
    done = executed("--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = here("serve", "--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = here("serve", "--help")
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


def test_schedule_answers_in_this_process():
    done = here(
        "schedule", "How many green crescents are there?", "What colour is the star?",
        "--image", IMAGE, "--temperature", 0, "--regex", "[a-z]+|[0-9]", "--logprobs", "--top-logprobs", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "green crescents are there?\n  2\n" in done.stdout
    assert "the star?\n  pink\n" in done.stdout
    assert re.search(r"-0\.\d{4}  '2'  '2' -0\.\d{4}\n", done.stdout)
    assert re.search(r"positions, [1-9]\d* of them cached, 0 crops encoded", done.stdout)
    assert re.search(
        r"first token \d+ ms .*prefill \d+ of \d+ positions.*decode \d+ tokens", done.stdout
    )
    assert "decode 0 tokens, total" in done.stdout
    assert re.search(r"2 prompts in [\d.]+ s: \d+ tokens", done.stdout)


def test_schedule_streams_and_prints_json():
    asked = ["schedule", "What do you see?", "--image", IMAGE, "--temperature", 0, "--logprobs"]
    streamed, whole = here(*asked, "--stream"), here(*asked, "--json")
    assert streamed.returncode == 0, streamed.stderr
    (line,) = whole.stdout.splitlines()
    result = json.loads(line)
    assert result["output"]["answer"] in streamed.stdout
    assert result["metrics"]["output_tokens"] == len(result["token_ids"])
    assert "".join(token["utf8"] for token in result["logprobs"]) == result["output"]["answer"]


def test_schedule_fails_on_an_empty_answer(golden_folder):
    # With this seed the golden model ends at once.
    done = here(
        "schedule", "hi", "--weights", golden_folder("md3"), "--seed", 505, "--temperature", 100, "--top-p", 1,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the answer to 'hi' is empty" in done.stderr


def test_schedule_names_what_it_cannot_take():
    done = here("schedule", "hi", "--image", __file__)
    assert done.returncode == 1
    assert "prompt 1: image" in done.stderr
    done = here("schedule", "a", "b", "c", "--image", "x", "--image", "y")
    assert done.returncode == 2
    assert "2 images for 3 prompts" in done.stderr


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


def test_a_misspelt_model_ends_the_server_before_it_listens():
    for flags in (
        ["--model", "nope"],
        ["--weights", "/absent"],
        ["--workers", 2, "--model", "nope"],
    ):
        done = here("serve", "--listen", "127.0.0.1:0", *flags)
        assert done.returncode == 2
        (error,) = done.stderr.splitlines()
        assert error.startswith(f"kestrel-grpc serve: error: {flags[-2]}={flags[-1]}: ")


def test_a_port_in_use_is_named(server):
    done = kestrel("serve", "--listen", server[0])
    assert done.returncode == 1
    assert f"cannot listen on {server[0]}: address already in use" in done.stderr


@pytest.mark.parametrize(
    ("number", "start"),
    [
        (signal.SIGTERM, ForkedProcess),
        (signal.SIGINT, ForkedProcess),
        pytest.param(signal.SIGTERM, subprocess.Popen, marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_the_model_loads_ends_the_server(tmp_path, number, start):
    """A new process imports torch when the signal comes, a fork reads weights."""
    process = Process(tmp_path / "log", "--listen", f"unix:{tmp_path}/k.sock", start=start)
    try:
        while "listening" not in process.log.read_text():
            assert process.popen.poll() is None, process.log.read_text()
            time.sleep(0.01)
        process.signal(number)
        assert process.wait() == 0
    finally:
        process.kill()
    assert not (tmp_path / "k.sock").exists()


def test_ctrl_c_leaves_out_the_delay_before_draining(tmp_path):
    process = Process(
        tmp_path / "log", "--listen", f"unix:{tmp_path}/k.sock", "--drain-delay", "60"
    ).started()
    try:
        process.signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
    log = process.log.read_text()
    assert "draining" in log and "leaving" not in log


def test_a_second_signal_ends_the_server_at_once(golden_folder, tmp_path):
    socket = f"unix:{tmp_path}/k.sock"
    process = Process(
        tmp_path / "log", "--weights", golden_folder("md3"), "--listen", socket
    ).started()
    # Seed 7 makes the golden model say 1641 tokens, some six seconds of them.
    client = ForkedProcess(
        [*PROGRAM, "query", "hi", "--server", socket, "--max-tokens", "1900", "--temperature", "100",
         "--top-p", "1", "--seed", "7", "--stream"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(),
    )  # fmt: skip
    try:
        assert client.stdout.read(1), client.stderr.read()
        process.signal(signal.SIGTERM)
        while "SIGTERM" not in process.log.read_text():
            time.sleep(0.01)
        process.signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert client.wait(timeout=60) == 1
        assert "unavailable" in client.stderr.read()
    finally:
        process.kill()
        client.kill()
        client.communicate()
    assert not (tmp_path / "k.sock").exists()


@pytest.mark.slow
def test_a_demo_that_is_told_to_stop_takes_its_server_along(tmp_path):
    # The path of a socket has 103 bytes at most, and this test's folder has a long path.
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    popen = ForkedProcess(
        [*PROGRAM, "demo", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(TMPDIR=str(short)),
    )
    with popen:
        popen.stdout.readline()
        assert READY.match(popen.stdout.readline().strip())
        popen.send_signal(signal.SIGTERM)
        # The folder of the socket is removed only after the server has ended.
        assert popen.wait(60) == 130
    assert not list(short.glob("kestrel-own-*"))
    shutil.rmtree(short)


def test_the_server_of_a_demo_ends_when_nobody_holds_its_pipe(tmp_path):
    watched, held = os.pipe()
    command = [sys.executable, "-m", "kestrel_grpc.cli.own_server_process"]
    server = ForkedProcess(
        [*command, str(watched), "--listen", f"unix:{tmp_path}/s.sock"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
        pass_fds=(watched,),
    )  # fmt: skip
    os.close(watched)
    with server:
        assert READY.match(server.stdout.readline().strip())
        os.close(held)
        assert server.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_a_demo_that_is_killed_leaves_no_server(tmp_path):
    # A socket has a path of 103 bytes at most, and this test's folder a long one.
    short = tempfile.mkdtemp(dir="/tmp")
    popen = ForkedProcess(
        [*PROGRAM, "demo", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(TMPDIR=short),
    )
    with popen:
        popen.stdout.readline()
        assert READY.match(popen.stdout.readline().strip())
        (server,) = psutil.Process(popen.pid).children()
        assert "server.sock" in _command_line(server)
        popen.send_signal(signal.SIGKILL)
        assert popen.wait(60) == -signal.SIGKILL
    try:
        server.wait(60)
    except psutil.TimeoutExpired:  # Its new parent may not wait for it; then it is a zombie.
        assert _command_line(server) == ""
    shutil.rmtree(short)


@pytest.fixture
def demo_servers(monkeypatch):
    """Makes the servers of demos that run in this process forks, and lists them."""
    servers = []

    def start(*arguments, **options):
        servers.append(ForkedProcess(*arguments, **options))
        return servers[-1]

    monkeypatch.setattr(
        own_server, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
    )
    handler = signal.getsignal(signal.SIGTERM)
    yield servers
    signal.signal(signal.SIGTERM, handler)


def assert_complete(demo, folder):
    assert demo.returncode == 0, demo.stderr
    for skill in ("query", "caption", "point", "detect", "segment"):
        assert f"\n{skill}: " in demo.stdout, demo.stderr
    assert "ANOTHER" not in demo.stdout
    assert (folder / "detect.png").exists()


@pytest.mark.slow
def test_the_demo_calls_everything_and_ends_its_server(tmp_path, demo_servers):
    assert_complete(here("demo", "--output", tmp_path / "out"), tmp_path / "out")
    (server,) = demo_servers
    assert server.returncode == 0


@pytest.mark.slow
def test_the_demo_as_users_start_it_leaves_no_process(tmp_path):
    assert_complete(executed("demo", "--output", tmp_path / "out"), tmp_path / "out")
    ours = [
        p for p in psutil.Process().children(recursive=True) if "server.sock" in _command_line(p)
    ]
    assert ours == []


def _command_line(process):
    """Empty for one that ends at this moment, or has and was not waited for yet: other tests' processes may."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # A zombie is one as well.
        return ""
