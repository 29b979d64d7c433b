"""Decode rows that share positions: which ones are found, and that answers stay as they are."""

import pytest
import torch

from kestrel_engine.runtime.gpu.graphs import shared_ladder
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.gpu.state.shared_rows import SharedRows
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import PREVIOUS, EncodeSlice, Row, StepPlan, TokenRule
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import Talk, answers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def row(number: int, start: int, *pages: int) -> Row:
    return Row(number, (PREVIOUS,), start, pages, None)


def found(rows: list[Row]) -> tuple[list[int], list[list[int]]] | None:
    """The shared positions of each row, and the tiles; None if reading once does not pay."""
    shared = SharedRows(32, 2, 16, page_size=10, device=DEVICE)
    if not shared.send(rows):
        return None
    on_device = shared.of(len(rows))
    tiles = [tile[: 2 + tile[0]] for tile in on_device.tiles.tolist() if tile[0]]
    return on_device.counts.tolist(), tiles


def test_rows_with_the_same_first_pages_form_a_group():
    rows = [row(i, 35, 5, 6, 7, 20 + i) for i in range(7)] + [row(7, 12, 9, 10)]
    assert found(rows) == ([30] * 7 + [0], [[7, 30, *range(7)]])


def test_pages_that_a_step_writes_are_not_shared():
    rows = [row(i, 30 + i, 5, 6, 7, 20 + i) for i in range(8)]
    rows[3] = row(3, 29, 5, 6, 7)
    assert found(rows) == ([20] * 8, [[8, 20, *range(8)]])


def test_more_rows_than_a_tile_holds_take_several():
    rows = [row(i, 35, 5, 6, 7, 20 + i) for i in range(20)]
    assert found(rows) == ([30] * 20, [[16, 30, *range(16)], [4, 30, *range(16, 20)]])


def test_few_rows_and_small_savings_are_left_alone():
    assert found([row(i, 35, 5, 6, 7, 20 + i) for i in range(7)]) is None
    # Only one page of ten is common.
    assert found([row(i, 100, 5, *range(20 * i + 10, 20 * i + 20)) for i in range(8)]) is None
    # Groups of three rows.
    assert found([row(i, 35, i // 3, 50 + i // 3, 60 + i // 3, 90 + i) for i in range(9)]) is None


def test_captured_sizes_double():
    assert shared_ladder(64, 8) == (8, 16, 32, 64)
    assert shared_ladder(24, 8) == (8, 16, 24)
    assert shared_ladder(8, 8) == (8,)


def noting_groups(collect, kind, groups):
    def observed(handle):
        result = collect(handle)
        groups.append((kind, result.shared_groups))
        return result

    return observed


@pytest.mark.slow_with("moondream2")
@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_answers_about_one_image_are_those_of_the_reference(family, monkeypatch):
    config, tensors = small_model(family)
    page = config.image_prefix
    sizes = {"num_pages": 80, "page_size": page, "max_batch_size": 9, "max_seq_length": 200}
    reference = torch_runtime(config, tensors, **sizes)
    tested = gpu_runtime(config, tensors, **sizes)
    image = picture("image", (1, 1), config, seed=2)
    said, groups = [], []
    for runtime in (reference, tested):
        prompt = (0, ImageBlock("image", config.image_positions))
        first = StepPlan(
            0,
            encode=(EncodeSlice(image, 0, image.num_crops),),
            prefill=(Row(99, prompt, 0, (79,), None),),
        )
        runtime.collect(runtime.launch(first))
        talks = [
            Talk(n, [10 + n, 20 + n], [TokenRule(suppressed=(3,))] * (3 + n % 2)) for n in range(9)
        ]
        for talk in talks[:8]:
            talk.pages, talk.position = (79, *talk.pages), page
        monkeypatch.setattr(
            runtime, "collect", noting_groups(runtime.collect, type(runtime), groups)
        )
        said.append(answers(runtime, talks))
        runtime.close()
    wanted, got = ({n: [t.id for t in tokens] for n, tokens in each.items()} for each in said)
    assert got == wanted
    assert len({tuple(ids) for ids in got.values()}) > 3
    # Both runtimes tell which rows shared reads.
    assert {(TorchRuntime, (8,)), (GpuRuntime, (8,))} <= set(groups)
