"""``kestrel-grpc schedule``: answers in its own process, without a server."""

import json
import re

from tests.service.command_line import ROOT, here

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"


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
        "schedule", "hi", "--weights", golden_folder("md3"), "--seed", 1829, "--temperature", 100, "--top-p", 1,
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
