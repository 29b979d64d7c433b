"""The arithmetic behind the trace's figures: steady rates, device time, phases, work that can't be avoided."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.device.model_work import decoder_bytes, moe_flop, prefix_flop, vision_flop
from benchmarks.traffic.callers import Answer
from benchmarks.traffic.step_log import StepLog
from benchmarks.traffic.trace_run import Exchange, busy_rate, steady
from kestrel_engine import SchedulerStats, StepEvent
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.types.model_config import Family, parse_model_config
from tests.engine.models.small import random_tensors, small_config


def answer(seen: list[tuple[float, int]]) -> Answer:
    return Answer(1.0, 1.0, 10, seen[-1][1], 0, seen)


def test_steady_rate_counts_only_while_all_decode():
    first = answer([(0.0, 1), (1.0, 11), (2.0, 21), (3.0, 31)])
    second = answer([(0.5, 1), (2.5, 41), (9.0, 50)])
    found = steady([first, second])
    assert (found.begin, found.end) == (0.5, 3.0)
    # The first gains 25 between 0.5 and 3.0; the second 40 up to 2.5 and a 13th of 9 after it.
    assert found.tokens_s * 2.5 == pytest.approx(25 + 40 + 9 * 0.5 / 6.5)


def test_streams_that_never_meet_have_no_steady_rate():
    with pytest.raises(AssertionError, match="longer answers"):
        steady([answer([(0.0, 1), (1.0, 5)]), answer([(2.0, 1), (3.0, 5)])])


def test_the_rate_while_all_callers_wait():
    """Two callers, of whom one leaves early: the answers of the other alone do not count."""
    ends = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 9.0, 12.0]
    asked = [Exchange(False, end - 1, end, answer([(end, 1)])) for end in reversed(ends)]
    assert busy_rate(asked, 2) == pytest.approx(4 / (3.5 - 1.5))
    assert math.isnan(busy_rate(asked, 3))


def test_phases_of_the_steps_of_a_stretch():
    log = StepLog()
    for number in range(4):
        begin = 100.0 + 0.003 * number
        log.on_step(
            StepEvent(
                step_id=number,
                launched_at=begin,
                collected_at=begin + 0.003,
                vision_s=0.0,
                prefill_s=0.001,
                decode_s=0.001,
                num_crops=0,
                num_prefill_positions=10,
                num_decode=16,
                request_ids=("r",),
                encoded_request_ids=(),
                failed=False,
                stats=SchedulerStats(running=16, pages_free=1, pages_cached=1, pages_total=2),
            )
        )
    phases = log.between(100.0, 100.0091)
    assert phases.steps_s == pytest.approx(3 / 0.0091)
    assert phases.busy == pytest.approx(3 * 0.002 / 0.0091)
    assert phases.mean_batch == 16


def test_operations_of_the_released_models():
    two = parse_model_config({}, family="moondream2")
    three = parse_model_config({}, family="moondream3")
    # 445 TFLOP/s were 665 crops a second.
    assert vision_flop(two, 1) == pytest.approx(445e12 / 665, rel=0.01)
    # 1.2 G weights of the dense decoder's blocks, each a multiply-add a position, and attention.
    weights = 24 * (4 * 2048**2 + 2 * 2048 * 8192)
    attention = 24 * 4 * 730**2 * 2048
    assert prefix_flop(two, 16) == pytest.approx(16 * (2 * 730 * weights + attention))
    assert moe_flop(three, 1) == 2 * 8 * 3 * 2048 * 1024 + 2 * 2048 * 64
    assert prefix_flop(three, 1) > prefix_flop(two, 1)


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_a_decode_step_in_fp8_reads_the_copies_instead_of_the_weights(family: Family) -> None:
    config = small_config(family)
    model = Moondream(config, random_tensors(config))
    wide, narrow = (decoder_bytes(model, torch.float32, in_fp8=fp8) for fp8 in (False, True))
    text, dense = config.text, config.text.n_layers if config.text.moe is None else 1
    rows = text.n_layers * 4 * text.dim + dense * (text.ff_dim + text.dim)
    weights = text.n_layers * 4 * text.dim**2 + dense * 2 * text.dim * text.ff_dim
    assert wide.dense - narrow.dense == 3 * weights - 4 * rows
    assert replace(narrow, dense=wide.dense) == wide
