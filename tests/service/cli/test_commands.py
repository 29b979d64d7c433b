"""The command line: commands against a served checkpoint, what they print, and their exit statuses.

A command of each kind is started as users start it, and so are servers in slow tests. Other servers and commands are
forks, which start within milliseconds, or run in this process.
"""

import ast
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from kestrel_grpc import __version__
from kestrel_grpc.cli.program import main
from tests.forking.process import run_forked
from tests.service.cli.serve_process import READY, Process
from tests.service.command_line import PROGRAM, ROOT, environment, executed, here, kestrel
from tests.tiny import SPARE_REFINER

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """kestrel-tiny, served on TCP and on a unix socket; yields (TCP address, socket's address)."""
    folder = tmp_path_factory.mktemp("served")
    socket = f"unix:{folder}/kestrel.sock"
    arguments = [
        "--listen", "127.0.0.1:0", "--listen", socket, "--access-log", "json", "--refiner", SPARE_REFINER,
    ]  # fmt: skip
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
    points = [
        point
        for span in thought["answers"][0]["reasoning"]["grounding"]
        for point in span["points"]
    ]
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


@pytest.mark.slow
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
    assert len(ask(server, "point", IMAGE, *several).stdout.splitlines()) == 2
    for flags, why in (
        (["--tile-overlap", 0.2], "--tile-overlap: needs --tiles"),
        (["--tiles", "2"], "must be rows and columns, like 2x3"),
        (["--region", "0,1"], "must be four numbers"),
    ):
        assert why in ask(server, "point", IMAGE, "cat", *flags).stderr


def test_a_budget_limits_the_crops(server):
    for flags, crops in ((), 5), (["--max-crops", 1], 1):
        found = json.loads(ask(server, "query", IMAGE, "How many?", *flags, "--json").stdout)
        assert found["num_crops"] == crops
        embedded = json.loads(ask(server, "embed", IMAGE, "--crops", *flags).stdout)
        assert embedded["num_crops"] == len(embedded["crops"]) == crops
    above = ask(server, "query", IMAGE, "How many?", "--max-crops", 7).stderr
    assert "--max-crops: is 7; must be from 1 to 6" in above
    zero = ask(server, "query", IMAGE, "How many?", "--max-crops", 0).stderr
    assert "--max-crops: is 0; must be at least 1" in zero
    below = ask(server, "query", IMAGE, "How many?", "--max-crops", "-1").stderr
    assert "--max-crops: '-1': must be a whole number" in below


def test_several_objects_are_found_in_one_call(server):
    words = ["detect", IMAGE, "--object", "green crescent", "--object", "red circle"]
    alone = ask(server, "detect", IMAGE, "green crescent").stdout
    done = ask(server, *words)
    assert done.returncode == 0 and "no red circle found" in done.stderr
    assert done.stdout == f"green crescent:\n{alone}red circle:\n"
    streamed = ask(server, *words, "--stream").stdout.splitlines()
    assert len(streamed) == 2 and all(line.startswith("green crescent: ") for line in streamed)
    described = json.loads(ask(server, *words, "--json").stdout)
    assert [box["label"] for box in described["objects"]] == ["green crescent"] * 2
    assert [each["object"] for each in described["searches"]] == ["green crescent", "red circle"]
    points = json.loads(ask(server, "point", *words[1:], "--json", "--max-objects", 1).stdout)
    assert len(points["points"]) == 1
    assert "no image is given" in ask(server, "detect", "--object", "cat").stderr


def test_several_samples_are_printed_with_their_seeds(server):
    words = ["caption", IMAGE, "short", "--temperature", 1.5, "--max-tokens", 8]
    texts = [ask(server, *words, "--seed", seed).stdout for seed in (3, 4, 5)]
    done = ask(server, *words, "--seed", 3, "--samples", 3)
    assert done.stdout == "".join(
        f"seed {n}:\n{text}" for n, text in zip((3, 4, 5), texts, strict=True)
    )
    described = json.loads(ask(server, *words, "--seed", 3, "--samples", 3, "--json").stdout)
    assert [sample["text"] + "\n" for sample in described["captions"]] == texts
    assert described["caption"] == described["captions"][0]["text"]
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
    assert "--regex: unclosed group at character 1" in failed
    assert "not allowed with" in ask(server, *words, "--regex", "x", "--choice", "y").stderr
    assert "--grammar" in ask(server, *words, "--grammar", tmp_path / "none").stderr
    plain = json.loads(ask(server, *words, "--logprobs", "--json").stdout)
    bias = f"{plain['answers'][0]['logprobs']['tokens'][0]['id']}=-100"
    assert ask(server, *words, "--logit-bias", bias).stdout.strip() != plain["answer"].strip()
    assert "like 17=-100" in ask(server, *words, "--logit-bias", "x").stderr
    assert "--presence-penalty: 3.0 is not" in ask(server, *words, "--presence-penalty", 3).stderr


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
    logged = described["captions"][0]["logprobs"]
    assert len(logged["tokens"]) == described["usage"]["output_tokens"]
    assert logged["mean"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-3)
    lines = ask(server, *words, "--logprobs", "--json", "--stream").stdout.splitlines()
    told = [token for line in lines for token in json.loads(line).get("tokens", [])]
    assert (
        told
        == json.loads(lines[-1])["final"]["captions"][0]["logprobs"]["tokens"]
        == logged["tokens"]
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
    assert refused.returncode != 0 and "--stop: must not be empty" in refused.stderr
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
    (described,) = json.loads(done.stdout)["segments"]
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
    told = ask(server, "segment", IMAGE, "pink star", "--json", "--coarse").stdout
    (coarse,) = json.loads(told)["segments"]
    assert (coarse["svg_path"], coarse["box"]) == (
        described["coarse_path"],
        described["coarse_box"],
    )
    assert coarse["coarse_path"] is None


def test_finished_results_of_a_batch_are_drawn_as_new_ones_are(server, tmp_path):
    tasks = [
        *("--detect", "green crescent", "--point", "pink star", "--segment", "pink star"),
        *("--caption", "short", "--query", "How many green crescents are there?"),
    ]
    words = ["batch", IMAGE, *tasks, "--output", tmp_path / "results.jsonl", "--quiet"]
    for folder in ("new", "finished"):
        done = ask(server, *words, "--overlays", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    new, finished = (
        (tmp_path / folder / "demo.png").read_bytes() for folder in ("new", "finished")
    )
    assert finished == new and "1 were done before" in done.stdout


def test_a_chat_at_a_terminal(server):
    lead, follow = os.openpty()
    # The model knows no conversations.
    asked = ("chat", str(IMAGE), "--server", server[0], "--temperature", "0", "--independent")
    streams = {"stdin": follow, "stdout": follow, "stderr": follow}
    chat = subprocess.Popen([*PROGRAM, *asked], cwd=ROOT, env=environment(TERM="dumb"), **streams)
    os.close(follow)
    shown = b""

    def until(pattern):
        nonlocal shown
        while not (found := re.search(pattern, shown)):
            assert select.select([lead], [], [], 60)[0], shown
            shown += os.read(lead, 4096)
        shown = shown[found.end() :]

    try:
        until(rb"\? ")
        os.write(lead, b"How many green crescents are there?\n")
        until(rb"there\?\r\n2\r\n.*\? ")
        os.write(lead, b"What colour is the star?\n")
        until(rb"star\?\r\npink\r\n.*\? ")
        os.write(lead, b"\x04")  # Ctrl-D
        assert chat.wait(60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(lead)


def test_models_and_health(server):
    done = ask(server, "models")
    assert done.stdout.startswith("kestrel-tiny: ready\n")
    assert "segment" in done.stdout
    described = json.loads(ask(server, "models", "--json").stdout)
    assert described["models"][0]["name"] == "kestrel-tiny"
    assert described["models"][0]["license"] == "", "known for bundled weights only"
    assert len(described["models"][0]["weights_fingerprint"]) == 64
    assert described["models"][0]["device"] == "cpu"
    assert described["models"][0]["dtype"] == "float32"
    assert described["server"]["default_model"] == "kestrel-tiny"
    done = ask(server, "health")
    assert (done.returncode, done.stdout) == (0, "SERVING\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["detect", "{picture}", " "], "detect.objects[0]: must not be empty [INVALID_ARGUMENT]"),
        (
            ["query", "{picture}", "what?", "--model", "moondream3"],
            "options.model: 'moondream3' is not served; this server serves kestrel-tiny",
        ),
        (["query", "hi", "--max-tokens", "0"], "--max-tokens: 0 is not"),
        (["caption", "nowhere.jpg"], "there is no image 'nowhere.jpg'"),
        (["caption", "{empty}"], "the folder '{empty}' holds no image"),
        (["caption", "img_gone", "--save", "x.png"], "give its file with --save-on FILE"),
        (["health", "--service", "x"], "has no service 'x'"),
        (["caption", "{text}"], "not in a supported format"),
        (["detect", "{picture}", "pink star", "--save", "/absent/x.png"], "cannot write"),
        (["detect", "{picture}", "pink star", "--save", "x.unknown"], "cannot write"),
    ],
)  # fmt: skip
def test_failures_are_one_line_and_status_1(server, tmp_path, arguments, words):
    named = [a.format(picture=IMAGE, text=__file__, empty=tmp_path) for a in arguments]
    done = ask(server, *named)
    assert done.returncode == 1
    (error,) = done.stderr.splitlines()
    assert error.startswith(f"kestrel-grpc {arguments[0]}: error: ")
    assert words.format(empty=tmp_path) in error


def test_why_there_is_no_connection_is_told(server):
    done = ask(server, "models", "--tls", "--timeout", "10")
    assert done.returncode == 1
    # gRPC may log before it.
    error = done.stderr.splitlines()[-1]
    assert "the server does not use TLS there" in error and "handshake failed" in error
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
        done = run_forked(
            [*PROGRAM, "token", "x"], stdout=full, text=True, cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "kestrel-grpc token: error: cannot write: No space left on device\n"


@pytest.mark.parametrize("words", [["--help"], ["query", "--help"], ["completion", "bash"]])
@pytest.mark.parametrize("why", ["Bad file descriptor", "No space left on device"])
def test_output_that_cannot_be_written_is_a_failure(words, why, monkeypatch, capsys):
    """Standard output is closed, or its text fails at the end, when the buffer is written."""
    monkeypatch.setattr(sys, "stdout", None if "descriptor" in why else open("/dev/full", "w"))
    try:
        assert main(words) == 1
    finally:
        sys.stdout.close()
    assert capsys.readouterr().err.endswith(f"error: cannot write: {why}\n")


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["watch", ".", "--caption", "--fps", "0"], 2, "--fps: '0': must be a whole number from 1"),
        (["batch", "README.md", "--caption", "--output", "/dev/full"], 1, "need a regular file"),
    ],
)
def test_what_would_never_end_is_refused(words, status, told):
    done = here(*words, "--server", "127.0.0.1:1")
    assert done.returncode == status and told in done.stderr


def test_help_and_version():
    done = executed("--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = here("serve", "--version")
    assert done.stdout == f"kestrel-grpc {__version__}\n"
    done = here("serve", "--help")
    assert "KESTREL_MAX_BATCH_SIZE" in done.stdout
    assert done.returncode == 0


def test_a_port_in_use_is_named(server):
    done = kestrel("serve", "--listen", server[0])
    assert done.returncode == 1
    assert f"cannot listen on {server[0]}: address already in use" in done.stderr


ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


def test_a_locale_of_ascii(server):
    """What it lacks is escaped as in JSON, and arguments are read as UTF-8."""
    done = ask(server, "detect", IMAGE, "größer 🐞", "--json", run=executed, **ASCII)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["searches"][0]["object"] == "größer 🐞"
    done = executed("doctor", "--help", **ASCII)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "\\u2026" in done.stdout


CONFINED = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
READ_ONLY = (
    "mount -o remount,bind,ro / && mount -t tmpfs -o size=4k none /dev/shm && "
    "mount -o remount,ro /dev/shm && cd / && "
)


@pytest.mark.slow_with("doctor")
@pytest.mark.parametrize("command", ["serve --listen 127.0.0.1:0", "doctor"])
def test_no_folder_for_temporary_files(command):
    tried = subprocess.run([*CONFINED, f"{READ_ONLY} ! touch /tmp/a"], capture_output=True)
    if tried.returncode:
        pytest.skip("a process may not make its files read-only here")
    line = f"{READ_ONLY} exec {shlex.quote(sys.executable)} -m kestrel_grpc {command}"
    variables = environment(PYTHONPATH=str(ROOT))
    variables.pop("TMPDIR", None)
    done = subprocess.run(
        [*CONFINED, line], capture_output=True, text=True, env=variables, timeout=120
    )
    assert done.returncode == 1, done.stderr
    said = done.stderr if "serve" in command else done.stdout
    assert "no folder for temporary files can be written" in said.splitlines()[-1]
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 1
