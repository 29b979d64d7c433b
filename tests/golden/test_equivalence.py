"""The same sequence computed in other ways gives the same result: pieces, pages, neighbours, follow-ups."""

import pytest
import torch

from kestrel_engine.types.requests import (
    Coord,
    ImageBlock,
    PreparedImage,
    Prompt,
    Size,
    num_positions,
)
from kestrel_engine.types.step import Row
from tests.golden.driver import Feed, pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=1e-5)


def whole(golden: Golden, case_id: str) -> torch.Tensor:
    return golden.arrays[f"{case_id}.prefill_hidden"]


@pytest.mark.slow_with("md2")
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("case_id", ["query.0", "query_noimage.0", "query_spatial.1"])
def test_chunks_equal_the_whole(golden: Golden, case_id: str, size: int) -> None:
    prompt = golden.prompt(golden.case(case_id))
    feed = Feed(golden.runtime, pages_for(golden.runtime, 800, seed=2))
    begin = 2 if isinstance(prompt[1], ImageBlock) else 1
    hidden = feed(*prompt[:begin])
    for i in range(begin, len(prompt), size):
        hidden = feed(*prompt[i : i + size])
    assert_same(hidden, whole(golden, case_id))


@pytest.mark.slow_with("md2", 1, 73)
@pytest.mark.parametrize("page_size", [1, 5, 73])
def test_page_size_changes_nothing(
    golden: Golden, pictures: dict[str, PreparedImage], page_size: int
) -> None:
    runtime = golden.new_runtime(page_size=page_size, num_pages=-(-1000 // page_size))
    case = golden.case("query.0")
    golden.encode(runtime, {case["image"]: pictures[case["image"]]})
    prompt = golden.prompt(case)
    for pages in (pages_for(runtime, 780), pages_for(runtime, 780, seed=page_size)):
        feed = Feed(runtime, pages)
        assert_same(feed(*prompt), whole(golden, "query.0"))
        hidden = feed(case["ids"][0])
        logits = runtime.model.text.logits(hidden[None])
        assert_same(logits[0], golden.arrays["query.0.decode_logits"][0])


@pytest.mark.slow_with("md2")
def test_rows_of_one_pass_equal_rows_alone(golden: Golden) -> None:
    """Prefills with and without an image, a chunk, and decode-like rows in one flat batch."""
    runtime = golden.runtime
    image = ImageBlock("square_378", golden.config.image_positions)
    prompts: list[Prompt] = [
        (0, image, 1, 375, 2, 50, 92, 3),
        (0, 1, 375, 2, Coord(0.25), Coord(0.5), Size(0.125, 0.5), 3),
        (0, 40, 41, 42, 43, 44),
        (0, image, 77),
    ]
    pages = [tuple(range(i * 80, (i + 1) * 80)) for i in range(len(prompts))]

    def rows(cuts: list[tuple[int, int]]) -> list[Row]:
        return [
            Row(i, prompt[a:b], num_positions(prompt[:a]), pages[i], None)
            for i, ((a, b), prompt) in enumerate(zip(cuts, prompts, strict=True))
        ]

    first = [(0, 5), (0, 4), (0, 1), (0, 2)]
    rest = [(a[1], len(p)) for a, p in zip(first, prompts, strict=True)]
    together = [runtime.hidden(rows(first)), runtime.hidden(rows(rest))]
    for i in range(len(prompts)):
        for cuts, hidden in zip((first, rest), together, strict=True):
            alone = runtime.hidden([rows(cuts)[i]])[0]
            assert_same(hidden[i], alone)


def test_a_second_turn_sees_the_first(golden: Golden) -> None:
    """A follow-up on a sequence's pages equals the same tokens in one prompt, whatever others did meanwhile."""
    runtime = golden.runtime
    turns = [(0, 1, 375, 2, 50, 92), (3, 3, 690, 609, 878), (1, 375, 2, 281, 3)]
    feed = Feed(runtime, (400, 13, 77))
    other = Feed(runtime, (401, 14, 78), sequence_id=1)
    for turn in turns:
        hidden = feed(*turn)
        other(0, *turn)
    at_once = Feed(runtime, (9, 8, 7))(*(token for turn in turns for token in turn))
    assert_same(hidden, at_once)
