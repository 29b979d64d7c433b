"""``count``: what it prints, and what it refuses."""

import json

from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.service.services.test_count_tokens import jpeg


async def test_what_it_prints_is_the_usage(kestrel):
    status, told, errors = await kestrel(
        "count", IMAGE, "--query", "What?", "--detect", "a cat", "--json"
    )
    assert (status, errors) == (0, "")
    count = json.loads(told)
    _, told, _ = await kestrel("query", IMAGE, "What?", "--json", "--max-tokens", 1)
    used = json.loads(told)["usage"]
    assert count["tasks"]["0"]["input_tokens"] == used["input_tokens"]
    assert count["image"] == str(IMAGE) and count["images"][0]["size"]["width"] == 857
    status, told, _ = await kestrel("count", IMAGE, "--query", "What?")
    image, task, total = told.splitlines()
    assert image.startswith("image of 857x783: ") and image.endswith(" crops")
    assert task.startswith(f"query 'What?': {used['input_tokens']} positions (")
    assert f": {used['input_tokens']} input tokens; the context has 300 positions" in total
    status, told, _ = await kestrel("count", "--query", "What?")
    assert status == 0 and told.startswith("query 'What?': ") and "(0 of images, " in told


async def test_one_question_about_all_images(kestrel, tmp_path):
    small = tmp_path / "small.jpg"
    small.write_bytes(jpeg(40, 30))
    words = ["count", small, small, "--query", "Which?"]
    status, told, _ = await kestrel(*words, "--together", "--json")
    together = json.loads(told)
    assert status == 0 and len(together["images"]) == 2
    assert together["image"] == f"{small}, {small}"
    _, told, _ = await kestrel(*words, "--json")
    alone = [json.loads(line) for line in told.splitlines()]
    positions = alone[0]["images"][0]["positions"]
    assert [each["input_tokens"] for each in alone] == [together["input_tokens"] - positions] * 2


async def test_what_is_refused(kestrel):
    for words, why in (
        ([IMAGE], "give at least one task"),
        ([IMAGE, "--caption", "--together"], "--together: needs one --query"),
        ([IMAGE, "--query", " "], "tasks[0].query.question"),
        (["--caption"], "no image is given, and only --query needs none"),
        (["none.jpg", "--caption"], "there is no image 'none.jpg'"),
    ):
        status, _, errors = await kestrel("count", *words)
        assert status in (1, 2) and why in errors, errors
