"""``gaze``: what it prints, and what it refuses."""

import json

import pytest

from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel


async def test_it_prints_each_gaze(kestrel, tmp_path):
    words = ["gaze", IMAGE, "--eye", "0.25,0.5", "--eye", "0.5,0.5"]
    status, told, _ = await kestrel(*words)
    first, second = told.splitlines()
    assert status == 0 and first.startswith("from 0.2500 0.5000: 0.")
    assert " px)  score 0." in first and second.startswith("from 0.5000 0.5000: ")
    status, told, _ = await kestrel(*words, "--json")
    described = json.loads(told)
    assert [each["eye"] for each in described["gazes"]] == [
        {"x": 0.25, "y": 0.5},
        {"x": 0.5, "y": 0.5},
    ]
    assert described["search"] is None and described["usage"]["output_tokens"] == 4
    _, told, _ = await kestrel(*words, "--stream", "--json")
    *events, final = map(json.loads, told.splitlines())
    assert len(events) == 2 and all("target" in each["gaze"] for each in events)
    assert final["final"]["gazes"] == described["gazes"]
    painted = tmp_path / "painted.png"
    status, _, _ = await kestrel("gaze", IMAGE, "--max-faces", 2, "--save", painted)
    assert status == 0 and painted.exists()
    face = ["--face", "0.25,0.25,0.5,0.75", "--accurate", "--seed", 7]
    same = [(await kestrel("gaze", IMAGE, *face))[1] for _ in range(2)]
    assert same[0] == same[1] and same[0].startswith("from 0.3750 0.5000: ")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--eye", "0.5"], "must be two numbers, like 0.5,0.5"),
        (["--eye", "a,b"], "must be a number"),
        (["--face", "0,0,1"], "must be four numbers"),
        (["--max-faces", "0"], "from 1 to 256"),
        (["--eye", "0.5,1.5"], "--eye: 1.5 is not a number in [0, 1]"),
        (["--eye", "0,0", "--face", "0,0,1,1"], "set only one of them"),
        (["--eye", "0,0", "--accurate"], "give the face instead of an eye"),
    ],
)
async def test_bad_flags_are_named(kestrel, flags, told):
    status, printed, errors = await kestrel("gaze", IMAGE, *flags)
    assert status != 0 and printed == "" and told in errors


async def test_an_image_is_needed(kestrel):
    status, _, errors = await kestrel("gaze", "--eye", "0,0")
    assert status != 0 and "no image is given: " in errors


async def test_analyze_and_count_take_gazes(kestrel):
    tasks = ["--gaze", "--gaze", "0.25,0.5", "--caption"]
    status, told, _ = await kestrel("analyze", IMAGE, *tasks, "--json")
    every, one, _ = json.loads(told)["tasks"].values()
    assert status == 0 and every["search"] is not None
    assert [each["eye"] for each in one["gazes"]] == [{"x": 0.25, "y": 0.5}]
    status, told, _ = await kestrel("count", IMAGE, *tasks)
    assert status == 0 and "gaze '0.25,0.5': " in told and "gaze: " in told
    status, _, errors = await kestrel("analyze", IMAGE, "--gaze", "0.25")
    assert status != 0 and "--gaze 0.25: must be two numbers, like 0.5,0.5" in errors
