"""Numbers and names that the command line refuses by itself: one line with the flag, the value and the limit."""

import shutil

import pytest

from kestrel_client.commands.values import MAX_INT64, number, seconds, timeout, whole
from tests.service.command_line import ROOT, here

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
UINT32 = "must be a whole number from 0 to 4294967295"


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--max-objects", "99999999999999999999"], 2, f"'99999999999999999999': {UINT32}"),
        (["--max-objects", "9" * 5000], 2, UINT32),
        (["--max-objects", "-1"], 2, UINT32),
        (["--max-objects", "1e3"], 2, UINT32),
        (["--top-k", "x"], 2, f"argument --top-k: 'x': {UINT32}"),
        (["--seed", str(2**63)], 2, "must be a whole number from 0 to 9223372036854775807"),
        (["--temperature", "nan"], 2, "argument --temperature: 'nan': must be a number"),
        (["--top-p", "much"], 2, "argument --top-p: 'much': must be a number"),
        (["--timeout", "nan"], 2, "--timeout: 'nan': must be a number of seconds above 0"),
        (["--timeout", "0"], 2, "'0': must be a number of seconds above 0"),
        (["--server", "127.0.0.1:99999"], 2, "--server: 127.0.0.1:99999 has port 99999"),
        (["--server", "[::1]:0"], 2, "a port is 1 to 65535"),
        (["--save", ""], 1, "--save: the name of the file or folder is empty"),
    ],
)
def test_an_invalid_flag_is_refused_with_its_limit(flags, status, words):
    done = here("detect", IMAGE, "cat", *flags)
    assert (done.returncode, done.stdout) == (status, "")
    (error,) = done.stderr.splitlines()
    assert error.startswith("kestrel-grpc detect: error: ") and words in error


def test_a_variable_is_named_with_its_value_once():
    done = here("models", KESTREL_TIMEOUT="nan")
    assert done.returncode == 2
    assert "KESTREL_TIMEOUT='nan': must be a number of seconds above 0" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["query", "", "what?"], "the name of an image is empty"),
        (["caption", IMAGE, "loong"], "'loong' is neither an image nor a length; the lengths are short, normal"),
        (["run", "query", "--argument", "a=1", "--argument", "a=2"], "--argument 'a' is given twice"),
        (["bench", "--concurrency", "0"], "'0': must be a whole number from 1 to 65536"),
        (["health", "--wait", "nan"], "'nan': must be a number of seconds from 0"),
        (["mcp", "--http", "99999"], "'99999': must be a whole number from 1 to 65535"),
        (["admin", "profile", "--seconds", "61"], "must be a number of seconds from 0.1 to 60"),
        (["completion"], "the following arguments are required: SHELL"),
        (["replay", IMAGE], "is not a captured request: it is not text"),
        (["replay", "nowhere"], "cannot read 'nowhere': No such file or directory"),
    ],
)  # fmt: skip
def test_invalid_words_are_refused_before_any_work(command, words):
    done = here(*command)
    assert done.returncode in (1, 2) and done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert words in error


def test_a_token_is_not_sent_unencrypted_and_the_flag_is_named():
    done = here("models", "--server", "example.com:50051", KESTREL_TOKEN="secret-secret-secret")
    assert done.returncode == 2
    assert "the token would be sent to example.com:50051 unencrypted; set --tls" in done.stderr


def test_save_never_replaces_the_image_that_is_asked_about(tmp_path):
    file = tmp_path / "photo.png"
    shutil.copy(IMAGE, file)
    before = file.read_bytes()
    for target in (file, tmp_path, f"{tmp_path}/../{tmp_path.name}/photo.png"):
        done = here("detect", file, "cat", "--save", target, "--server", "127.0.0.1:1")
        assert done.returncode == 1
        assert "would replace the image" in done.stderr and "name another file" in done.stderr
    assert file.read_bytes() == before


def test_an_address_may_be_saved_over_an_earlier_result(tmp_path):
    file = tmp_path / "found.png"
    file.write_bytes(b"an earlier result")
    done = here(
        *("detect", "http://127.0.0.1:1/photo.jpg", "cat"),
        *("--save", file, "--server", "127.0.0.1:1"),
    )
    assert done.returncode == 1
    assert "can't fetch http://127.0.0.1:1/photo.jpg" in done.stderr


def test_the_parsers_take_every_value_up_to_their_limits():
    assert whole()("0") == 0 and whole()("4294967295") == 2**32 - 1
    assert whole(0, MAX_INT64)(str(MAX_INT64)) == MAX_INT64
    assert number("-1.5e3") == -1500
    assert seconds(0.1, 60)("60") == 60
    assert timeout("inf") == float("inf"), "no limit"
