"""The likeliest ids of rows, against those of runtime.sampler for the same logits and rules."""

import dataclasses
import math
import random

import pytest
import torch

from kestrel_engine.runtime.sampler import sample
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import SampleSpec, TokenRule
from tests.kernels.sampling.test_sample import DEVICE, SMALL, encoded_rules, kernel, random_spec

likeliest = pytest.importorskip("kestrel_engine.kernels.sampling.likeliest").likeliest
MOST = 20


def by_kernel(logits, specs, tiles=SMALL):
    """The pairs of id and log-probability of each row."""
    rows = len(specs)
    rules, masks = encoded_rules(specs)
    work = kernel.allocate(rows, logits.shape[1], DEVICE, tiles)
    zeros = torch.zeros(rows, dtype=torch.float64, device=DEVICE)
    ints = torch.zeros(3, rows, dtype=torch.int32, device=DEVICE)
    logprobs = torch.zeros(rows, device=DEVICE)
    logits = logits.to(DEVICE)
    kernel.sample_rows(
        logits, rules, zeros, zeros + 1, ints[0].clone(), zeros.long(), greedy=True,
        ids=ints[1].clone(), logprobs=logprobs, bad=ints[2].clone(), tiles=tiles, workspace=work,
    )  # fmt: skip
    out = torch.full((rows, 2, MOST), -7, dtype=torch.int32, device=DEVICE)
    likeliest(logits, rules, work, out, tiles=tiles)
    del masks  # Only now, because the kernels read them.
    ids, values = out[:, 0].tolist(), out[:, 1].contiguous().view(torch.float32).tolist()
    for found, spec in zip(ids, specs, strict=True):
        assert all(token == -7 for token in found[spec.rule.top :])
    return [
        [(t, v) for t, v in zip(found, row, strict=True) if t >= 0]
        for found, row in zip(ids, values, strict=True)
    ]


def check(logits, specs, tiles=SMALL):
    expected = [drawn.top for drawn in sample(logits.float().clone(), specs)]
    for spec, row, wanted in zip(specs, by_kernel(logits, specs, tiles), expected, strict=True):
        assert [token for token, _ in row] == [token for token, _ in wanted], spec
        assert [v for _, v in row] == pytest.approx([v for _, v in wanted], rel=2e-5, abs=2e-5)


def asking(rule: TokenRule, top: int) -> SampleSpec:
    return SampleSpec(dataclasses.replace(rule, top=top), SamplingParams(), 0)


@pytest.mark.parametrize("kind", ["normal", "equal", "float16", "outlier"])
def test_the_ids_are_those_of_the_reference_sampler(kind):
    rng = random.Random(kind)
    logits = 3 * torch.randn(4, 150, generator=torch.Generator().manual_seed(4))
    if kind == "equal":
        logits = logits.round()
    elif kind == "float16":
        logits = logits.half()
    elif kind == "outlier":
        logits[:, 7] = 1e30
    tops = [0, 1, 7, 20]
    check(logits, [asking(random_spec(rng, 150).rule, top) for top in tops])


def test_fewer_allowed_ids_than_wanted():
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(9))
    rules = [TokenRule(allowed=(99, 3, 40), suppressed=(3,)), TokenRule(allowed=(70,))]
    check(logits, [asking(rule, 5) for rule in rules])


def test_the_default_tiles_and_several_ids_of_one_chunk():
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(2))
    logits[0, 1100:1110] += 20
    check(logits, [asking(TokenRule(), 20), asking(TokenRule(suppressed=(1105,)), 3)], None)


def test_a_row_that_is_not_finite_spoils_no_other():
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    logits[1] = math.nan
    good = [0, 2]
    specs = [asking(TokenRule(), 3)] * 3
    rows = by_kernel(logits, specs)
    expected = sample(logits[good].clone(), specs[:2])
    assert [[t for t, _ in rows[i]] for i in good] == [[t for t, _ in d.top] for d in expected]
