import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_engine.runtime.sampler import exponentials, sample
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import LogitEdit, SampleSpec, TokenRule, noise_key

PROBABILITIES = (0.05, 0.4, 0.3, 0.2, 0.05)


def logits(rows: int = 1, probabilities: tuple[float, ...] = PROBABILITIES) -> torch.Tensor:
    return torch.tensor(probabilities).log().repeat(rows, 1)


def draws(count: int, rule: TokenRule | None = None, **sampling: float) -> Counter[int]:
    rule = rule or TokenRule()
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **sampling})
    specs = [SampleSpec(rule, params, draw) for draw in range(count)]
    return Counter(drawn.id for drawn in sample(logits(count), specs))


def one(rule: TokenRule, **sampling: float) -> tuple[int, float]:
    return sample(logits(), [SampleSpec(rule, SamplingParams(**sampling), 0)])[0][:2]


def test_greedy_takes_the_best_and_says_how_likely_it_was():
    token, logprob = one(TokenRule())
    assert token == 1
    assert logprob == pytest.approx(math.log(0.4), abs=1e-6)


def test_frequencies_follow_the_probabilities():
    counts = draws(4000)
    for token, probability in enumerate(PROBABILITIES):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_sharpens():
    counts = draws(4000, temperature=0.5)
    total = sum(p**2 for p in PROBABILITIES)
    assert counts[1] / 4000 == pytest.approx(0.4**2 / total, abs=0.03)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    assert draws(50, temperature=temperature) == {1: 50}


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    assert set(draws(2000, top_p=0.39)) == {1}
    assert set(draws(2000, top_p=0.41)) == {1, 2}
    assert set(draws(2000, top_p=0.69)) == {1, 2}
    assert set(draws(2000, top_p=0.71)) == {1, 2, 3}


def test_top_k_comes_before_top_p():
    """After top-k the two left have 4/7 and 3/7, so a top_p of 0.5 leaves one; on all five it would leave two."""
    assert set(draws(2000, top_p=0.5)) == {1, 2}
    assert set(draws(2000, top_k=2, top_p=0.5)) == {1}
    assert set(draws(2000, top_k=3)) == {1, 2, 3}
    assert set(draws(2000, top_k=99)) == {0, 1, 2, 3, 4}
    assert draws(50, top_k=10**400) == draws(50, top_k=0)


def test_temperature_comes_before_top_p():
    assert set(draws(2000, temperature=0.2, top_p=0.6)) == {1}


def test_a_mask_of_bits():
    """Bit ``id % 8`` of byte ``id // 8``; what lies beyond the vocabulary does not count."""
    assert one(TokenRule(mask=bytes([0b01001, 0, 0, 0])))[0] == 3
    assert one(TokenRule(mask=bytes([0b10001, 0, 0, 255])))[0] in (0, 4)
    _, logprob = one(TokenRule(mask=bytes([0b01001, 0, 0, 0])))
    assert logprob == pytest.approx(math.log(0.2 / 0.25), abs=1e-6)
    assert set(draws(500, TokenRule(mask=bytes([0b10001, 0, 0, 0])))) == {0, 4}


def test_edits_against_a_plain_formula():
    """Bias, then repetition by the sign of the logit, then what is subtracted."""
    edits = (
        LogitEdit(1, minus=1.5),
        LogitEdit(3, bias=2.0, penalty=1.3),
        LogitEdit(4, penalty=2.0),
    )
    plain = [math.log(p) for p in PROBABILITIES]
    plain[1] -= 1.5
    plain[3] = (plain[3] + 2.0) / 1.3
    plain[4] *= 2.0
    assert math.log(0.2) + 2 > 0 > plain[4]
    token, logprob = one(TokenRule(edits=edits))
    total = math.log(sum(math.exp(x) for x in plain))
    assert token == max(range(5), key=plain.__getitem__) == 3
    assert logprob == pytest.approx(plain[3] - total, abs=1e-6)
    rule = TokenRule(edits=edits, mask=bytes([0b10011, 0, 0, 0]))
    assert one(rule)[0] == max((0, 1, 4), key=plain.__getitem__)
    counts = draws(4000, TokenRule(edits=edits))
    for each, x in enumerate(plain):
        assert counts[each] / 4000 == pytest.approx(math.exp(x - total), abs=0.03)


def test_min_p_keeps_what_is_near_the_best_at_the_temperature():
    assert set(draws(2000, min_p=0.51)) == {1, 2}
    assert set(draws(2000, min_p=0.49)) == {1, 2, 3}
    assert set(draws(2000, min_p=1.0)) == {1}
    assert set(draws(2000, min_p=0.51, temperature=0.5)) == {1, 2}
    assert set(draws(2000, min_p=0.57, temperature=0.5)) == {1}
    assert draws(500, min_p=0.0) == draws(500)


def test_min_p_comes_before_top_p():
    """Of 0.4, 0.3 and 0.2 the first two have 7/9."""
    assert set(draws(2000, min_p=0.4, top_p=0.75)) == {1, 2}
    assert set(draws(2000, min_p=0.4, top_p=0.8)) == {1, 2, 3}


def test_masks():
    assert one(TokenRule(suppressed=(1,)))[0] == 2
    assert one(TokenRule(allowed=(0, 3)))[0] == 3
    assert one(TokenRule(allowed=(0, 3), suppressed=(3,)))[0] == 0
    assert set(draws(500, TokenRule(allowed=(0, 4)))) == {0, 4}
    assert one(TokenRule(allowed=(0, 3)))[1] == pytest.approx(math.log(0.2 / 0.25), abs=1e-6)


def test_otherwise_turns_all_but_the_stop_into_one_id():
    rule = TokenRule(otherwise=4, stop=3)
    assert one(rule) == (4, pytest.approx(math.log(0.8), abs=1e-6))
    counts = draws(2000, rule)
    assert set(counts) == {3, 4}
    assert counts[3] / 2000 == pytest.approx(0.2, abs=0.03)
    assert one(TokenRule(otherwise=4, stop=1)) == (1, pytest.approx(math.log(0.4), abs=1e-6))


def top(rule: TokenRule, rows: torch.Tensor | None = None) -> tuple[tuple[int, float], ...]:
    rows = logits() if rows is None else rows
    return sample(rows, [SampleSpec(rule, SamplingParams(), 0)])[0].top


def test_the_likeliest_ids_with_their_log_probabilities():
    assert top(TokenRule()) == ()
    found = top(TokenRule(top=3))
    assert [token for token, _ in found] == [1, 2, 3]
    expected = [math.log(PROBABILITIES[token]) for token, _ in found]
    assert [logprob for _, logprob in found] == pytest.approx(expected, abs=1e-6)
    assert [token for token, _ in top(TokenRule(top=20))] == [1, 2, 3, 0, 4]


def test_the_likeliest_ids_are_those_that_the_rule_allows():
    rule = TokenRule(top=3, mask=bytes([0b01001, 0, 0, 0]))
    assert top(rule) == (
        (3, pytest.approx(math.log(0.8), abs=1e-6)),
        (0, pytest.approx(math.log(0.2), abs=1e-6)),
    )
    assert [token for token, _ in top(TokenRule(top=2, suppressed=(1,)))] == [2, 3]
    assert [token for token, _ in top(TokenRule(top=20, suppressed=(1,)))] == [2, 3, 0, 4]
    assert [token for token, _ in top(TokenRule(top=5, allowed=(4, 0)))] == [0, 4]
    edits = (LogitEdit(4, bias=9.0),)
    assert [token for token, _ in top(TokenRule(top=2, edits=edits))] == [4, 1]
    plain = top(TokenRule(top=2))
    assert top(TokenRule(top=2, otherwise=4, stop=3)) == plain


def test_of_equal_ids_the_smaller_come_first():
    rows = torch.zeros(1, 100)
    rows[0, 50] = 1.0
    found = top(TokenRule(top=4), rows)
    assert [token for token, _ in found] == [50, 0, 1, 2]
    assert found[1][1] == found[3][1]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=2, max_size=6), st.integers(0, 50))
def test_a_row_draws_the_same_whatever_its_neighbours(seeds, draw):
    rows = torch.randn(len(seeds), 40, generator=torch.Generator().manual_seed(seeds[0] % 2**31))
    specs = [
        SampleSpec(TokenRule(), SamplingParams(temperature=0.7, top_p=0.8, top_k=20, seed=s), draw)
        for s in seeds
    ]
    together = [drawn.id for drawn in sample(rows.clone(), specs)]
    alone = [sample(rows[i : i + 1].clone(), [spec])[0][0] for i, spec in enumerate(specs)]
    assert together == alone


def test_mixed_rows_of_greedy_and_drawn():
    specs = [
        SampleSpec(TokenRule(), SamplingParams(), 0),
        SampleSpec(TokenRule(), SamplingParams(temperature=1.0, seed=3), 0),
        SampleSpec(TokenRule(suppressed=(1,)), SamplingParams(), 0),
    ]
    ids = [drawn.id for drawn in sample(logits(3), specs)]
    noise = exponentials([noise_key(3, 0)], len(PROBABILITIES), "cpu")[0].tolist()
    expected = max(range(5), key=lambda token: PROBABILITIES[token] / noise[token])
    assert ids == [1, expected, 2]


def test_the_noise_is_that_of_splitmix64():
    """The numbers are the published outputs for the state 1234567."""
    outputs = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    expected = [-math.log(((z >> 12) + 0.5) / 2**52) for z in outputs]
    assert exponentials([7, 1234567], 5, "cpu")[1].tolist() == pytest.approx(expected, rel=1e-12)


def test_counts_of_a_seed():
    """Seeded results stay the same from version to version."""
    assert draws(4000) == {0: 225, 1: 1594, 2: 1188, 3: 793, 4: 200}
    assert draws(4000, temperature=2.0, top_k=3) == {1: 1519, 2: 1384, 3: 1097}
    assert draws(4000, top_p=0.85, seed=2**63 - 1) == {1: 1729, 2: 1369, 3: 902}


@pytest.mark.parametrize(
    ("sampling", "at_the_cut"),
    [
        ({}, 0),
        ({"min_p": 0.5}, 0),
        ({"top_p": 0.9}, 0),
        ({"top_k": 40}, 0),
        ({"top_k": 41}, 3),
        ({"top_p": 0.8, "top_k": 60}, 2),
    ],
)
def test_rounding_errors_of_the_logits_change_no_draw(sampling, at_the_cut):
    """Pairs of ids 1e-6 apart change places. By rank, the draws of many seeds would change. ``at_the_cut``: the draws
    whose winner is one of a pair that a cut divides."""
    count, vocab = 500, 200
    generator = torch.Generator().manual_seed(1)
    halves = torch.randn(count, vocab // 2, generator=generator)
    rows = torch.cat([halves, halves + 1e-6], dim=1)
    other = rows + 2e-6 * torch.rand(count, vocab, generator=generator)
    changed = (rows.argsort(dim=1, stable=True) != other.argsort(dim=1, stable=True)).any(dim=1)
    assert changed.all()
    params = [SamplingParams(temperature=4.0, seed=seed, **sampling) for seed in range(count)]
    specs = [SampleSpec(TokenRule(), each, 0) for each in params]
    found = [[drawn.id for drawn in sample(each.clone(), specs)] for each in (rows, other)]
    assert sum(a != b for a, b in zip(*found, strict=True)) == at_the_cut
    assert len(set(found[0])) > 40


def test_draws_differ_from_token_to_token_and_seed_to_seed():
    assert len({noise_key(9, i) for i in range(1000)}) == 1000
    assert len(draws(200, seed=1)) > 2 and draws(200, seed=1) != draws(200, seed=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(bad):
    rows = logits(3)
    rows[1, 2] = bad
    specs = [
        SampleSpec(TokenRule(), SamplingParams(temperature=1.0, seed=seed), 0) for seed in range(3)
    ]
    found = sample(rows, specs)
    assert found[1] is None
    assert [found[0], found[2]] == sample(logits(2), [specs[0], specs[2]])


def test_a_rule_that_forbids_everything_is_a_mistake():
    with pytest.raises(AssertionError, match="forbids every id"):
        one(TokenRule(allowed=(1,), suppressed=(1,)))
