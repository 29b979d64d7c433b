"""The command against a real server."""

import json

import pytest

from kestrel_client import AsyncKestrelClient
from kestrel_client.commands.bench.mix import Mix
from kestrel_client.commands.bench.sender import Plan, Stage, run_stage
from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.service.command_line import here
from tests.waiting import outlived


async def measured(kestrel, *flags):
    """A busy machine may end no request within a short stage. Then the stage is longer."""
    return await outlived(
        lambda seconds: kestrel("bench", *flags, "--seconds", seconds),
        lambda ended: "no request ended in time" not in ended[2],
        0.2,
    )


async def test_one_stage(kestrel):
    flags = ["--concurrency", 2, "--max-tokens", 4]
    status, told, _ = await measured(kestrel, *flags, "--json")
    found = json.loads(told)
    assert status == 0 and found["requests"] > 0 and found["errors"] == {}
    assert 0 < found["ttft_ms"]["p50"] <= found["total_ms"]["p99"]
    status, told, _ = await measured(kestrel, IMAGE, *flags)
    assert "requests/s" in told and "first token (TTFT)" in told
    status, told, _ = await measured(kestrel, *flags, "--unary")
    assert "whole answer" in told and "TTFT" not in told


async def test_a_program_makes_load(serve):
    """As the package's docstring shows it."""
    address = (await serve()).server.addresses[0]
    mix = Mix({"query": 1.0, "detect": 1.0}, ["How many?"], ["car"])
    plan = Plan(mix, [IMAGE.read_bytes()], options={"max_tokens": 4})
    async with AsyncKestrelClient(address) as client:
        tally, health = await outlived(
            lambda seconds: run_stage([client], plan, Stage("closed", 4, seconds)),
            lambda ended: ended[0].total,
            0.2,
        )
    assert tally.succeeded == tally.total > 0 and not tally.errors
    assert tally.ttft.percentile(50) > 0 and health.lag.count


async def test_stages_of_all_skills_are_stored(kestrel, tmp_path):
    result = tmp_path / "r.json"
    status, told, errors = await measured(
        kestrel, "--made-up", 2, "--size", "64x48", "--unique-images", 0.5, "--max-tokens", 8,
        "--mix", "query=2,caption,point,detect,segment", "--question", "a?", "--question", "b?",
        "--concurrency", "1,3,4", "--output", result, "--slo", "latency=60000",
    )  # fmt: skip
    assert (status, errors) == (0, "")
    stages = [line for line in told.splitlines() if " in flight for " in line]
    assert [line.partition(" for ")[0] for line in stages] == [
        "1 in flight",
        "3 in flight",
        "4 in flight",
    ]
    content = json.loads(result.read_text())
    assert [stage["concurrency_limit"] for stage in content["results"]] == [1, 3, 4]
    assert content["server"]["device"] and content["machine"]["cores"]
    assert content["settings"]["mix"]["query"] == 2
    assert all(stage["requests_success"] > 0 for stage in content["results"])
    skills = {"query", "caption", "point", "detect", "segment"}
    assert set(content["results"][2]["skills"]) <= skills
    status, told, _ = await kestrel("bench", "--compare", result, result)
    assert status == 0 and " compared, 0 worse by more than 5 %" in told


async def test_an_open_loop_ends_when_a_stage_is_overloaded(kestrel, tmp_path):
    result = tmp_path / "r.json"
    status, told, errors = await measured(
        kestrel, "--rate", "40,80", "--max-tokens", 2, "--slo", "latency=0.001", "--output", result,
    )  # fmt: skip
    assert (status, errors) == (0, "")
    assert "overloaded: " in told
    (stage,) = json.loads(result.read_text())["results"]
    assert stage["target_rps"] == 40 and stage["requests_success"] > 1
    assert stage["goodput_rps"] == 0 and stage["overloaded"]


async def test_refusals_are_counted_and_a_run_without_an_answer_fails(kestrel, tmp_path):
    status, _, errors = await kestrel("bench", "--model", "other", "--seconds", 0.1)
    assert status == 1 and "no request succeeded: " in errors and "other" in errors
    notes = tmp_path / "notes.jpg"
    notes.write_text("no image")
    status, _, errors = await kestrel("bench", notes, "--seconds", 0.1)
    assert status == 1 and "not in a supported format" in errors
    status, _, errors = await kestrel("bench", "--output", notes / "below")
    assert status == 1 and "cannot write" in errors
    status, _, errors = await kestrel("bench", "--output", tmp_path)
    assert status == 1 and "it is a folder" in errors


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seconds", 0], "'0': must be a number of seconds from 0.1 to 86400"),
        (["--max-rate", 5], "unknown flag --max-rate; give the levels to --concurrency or --rate"),
        (["--processes", 2], "unknown flag --processes; start one bench for each process"),
        (["--rate", 5, "--concurrency", 9], "--concurrency: --rate makes an open loop"),
        (["--rate", "5,,6"], "must be a number of requests per second above 0"),
        (["--rate", ",".join(["1"] * 101)], "has 101 numbers, the limit is 100"),
        (["--rate", "nan"], "'nan': must be a number of requests per second above 0"),
        (["--mix", "query=1,fly=2"], "'fly' is no skill; the skills are query, caption"),
        (["--mix", "query=1,query=2"], "'query' is given twice"),
        (["--mix", "query=-1"], "'-1' is not a number above 0"),
        (["--slo", "ttft"], "must be like ttft=500,itl=50"),
        (["--size", "1x1"], "must be a width and a height from 16 to 8192"),
        (["--unique-images", 2], "must be a number from 0 to 1"),
        (["--unique-images", 0.5, "img_x"], "an id was given"),
        (["--made-up", 2, "a.jpg"], "--made-up: images are given"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_sent(flags, words):
    done = here("bench", *flags)
    assert done.returncode == 2 and done.stdout == "" and words in done.stderr
