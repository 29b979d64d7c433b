"""What kestrel-small says about the pictures of ``make demo``, and what README prints of it."""

import re
from collections.abc import Iterator

import pytest

from kestrel_client import Box, KestrelClient, Point
from kestrel_client.commands.demo import ask_about, line_of
from kestrel_client.commands.own_server import own_server
from kestrel_client.commands.samples import samples
from tests.code_blocks import ROOT, code_blocks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def client(request: pytest.FixtureRequest) -> Iterator[KestrelClient]:
    with own_server(["--model", "kestrel-small", "--precision", request.param]) as (address, _):
        with KestrelClient(address) as client:
            yield client


def lies_in(mark: Point | Box, box: Box) -> bool:
    at = mark if isinstance(mark, Point) else mark.center
    return box.x_min <= at.x <= box.x_max and box.y_min <= at.y <= box.y_max


def test_every_answer_about_the_samples_is_right_and_as_readme_prints_it(
    client: KestrelClient,
) -> None:
    lines = []
    for sample in samples():
        for ask in sample.asks:
            result = ask_about(client, sample, ask)
            lines.append(without_places(line_of(ask, result)))
            if ask.skill == "query":
                assert lines[-1].endswith(f" {ask.answer}"), ask
                continue
            marks = [*result.marks.points, *(box for box, _ in result.marks.boxes)]
            assert len(marks) == len(ask.boxes), ask
            assert all(any(lies_in(mark, box) for box in ask.boxes) for mark in marks), ask
    blocks = code_blocks(ROOT / "README.md")
    (block,) = [block for block in blocks if block.text.startswith("query ")]
    printed = {without_places(line) for line in block.text.splitlines()}
    assert printed and printed <= {*lines}


def without_places(line: str) -> str:
    """Without pixels, which may differ by one between processors."""
    return re.sub(r"\([\d, ]+\)$", "(…)", line)
