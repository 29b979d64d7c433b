"""Shares of a step's seconds: by rows, positions and crops, and nothing is lost between them."""

from collections import Counter

import numpy as np

from kestrel_engine.steps.device_time import of_each_decode, of_new_work
from kestrel_engine.types.requests import PreparedImage, SamplingParams
from kestrel_engine.types.step import (
    PREVIOUS,
    EncodeSlice,
    RefineRow,
    Row,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenRule,
)


def row(sequence_id, tokens):
    return Row(sequence_id, tokens, 0, (), SampleSpec(TokenRule(), SamplingParams(), 0))


def test_each_phase_is_divided_by_its_own_work():
    image = PreparedImage("k", np.zeros((4, 2, 2, 3), np.uint8), (1, 3), 8, 8)
    plan = StepPlan(
        1,
        encode=(
            EncodeSlice(image, 0, 3, sequence_id=1),
            EncodeSlice(image, 3, 4, reused=(3,), sequence_id=2),
        ),
        prefill=(row(1, (5, 6, 7)), row(2, (5,)), row(4, (PREVIOUS,))),
        decode=(row(3, (9,)), row(5, (PREVIOUS,))),
        refine=(RefineRow(6, np.zeros(0), np.zeros(0)),),
    )
    result = StepResult(vision_s=4.0, prefill_s=8.0, decode_s=2.0)
    found = Counter()
    for sequence_id, seconds in of_new_work(plan, result):
        found[sequence_id] += seconds
    assert found == {1: 3.0 + 6.0, 2: 2.0, 6: 1.0}
    assert of_each_decode(plan, result) == 1.0
    idle = StepPlan(2), StepResult(decode_s=1e-6)
    assert list(of_new_work(*idle)) == [] and of_each_decode(*idle) == 0.0
