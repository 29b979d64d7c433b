"""The kernel's ids and log-probabilities against those of runtime.sampler, for the same logits, rules and draws."""

import math
import random

import numpy as np
import pytest
import torch

from kestrel_engine.runtime.sampler import sample
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import SampleSpec, TokenRule, noise_key

kernel = pytest.importorskip("kestrel_engine.kernels.sampling.sample")
layout = pytest.importorskip("kestrel_engine.kernels.sampling.logits")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = kernel.SamplingTiles(chunk=64, edges=4, fine=4, short=4, listed=16, block=32, pivots=4)
"""Several chunks, stretches cut twice, short and long lists, and searched rows at a small vocabulary."""


def encoded(rule: TokenRule, mask: int = 0) -> list[int]:
    """``mask``: the address of the rule's mask."""
    row = [0] * layout.RULE_WIDTH
    row[layout.FORCED] = -1 if rule.forced is None else rule.forced
    row[layout.OTHERWISE] = -1 if rule.otherwise is None else rule.otherwise
    row[layout.STOP] = rule.stop
    row[layout.NUM_TOP] = rule.top
    allowed = rule.allowed or ()
    row[layout.NUM_SUPPRESSED], row[layout.NUM_ALLOWED] = len(rule.suppressed), len(allowed)
    row[layout.SUPPRESSED : layout.SUPPRESSED + len(rule.suppressed)] = rule.suppressed
    row[layout.ALLOWED : layout.ALLOWED + len(allowed)] = allowed
    if mask:
        row[layout.MASK : layout.MASK + 2] = np.array([mask], np.int64).view(np.int32).tolist()
    return row


def encoded_rules(specs) -> tuple[torch.Tensor, torch.Tensor]:
    """The rules [rows, RULE_WIDTH] int32 of ``specs``, and their masks, which the caller holds until they are read."""
    masks = np.zeros((len(specs), layout.MASKED_AT_ONCE // 8), np.uint8)
    for row, spec in zip(masks, specs, strict=True):
        mask = spec.rule.mask or b""
        row[: len(mask)] = np.frombuffer(mask, np.uint8)
    held = torch.from_numpy(masks).to(DEVICE)
    rows = [
        encoded(spec.rule, mask.data_ptr() if spec.rule.mask else 0)
        for spec, mask in zip(specs, held, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE), held


def by_kernel(logits, specs, tiles=SMALL, greedy=False, workspace=None):
    """[(id, logprob, bad)] of each row."""

    def column(values, dtype=torch.float64):
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    ids = column([-7] * len(specs), torch.int32)
    logprobs = column([math.nan] * len(specs), torch.float32)
    bad = column([-7] * len(specs), torch.int32)
    rules, masks = encoded_rules(specs)
    keys = np.array([noise_key(spec.sampling.seed, spec.draw) for spec in specs], np.uint64)
    kernel.sample_rows(
        logits.to(DEVICE),
        rules,
        column([spec.sampling.temperature for spec in specs]),
        column([spec.sampling.top_p for spec in specs]),
        column([min(spec.sampling.top_k, 2**31 - 1) for spec in specs], torch.int32),
        torch.tensor(keys.view(np.int64), device=DEVICE),
        greedy=greedy,
        ids=ids,
        logprobs=logprobs,
        bad=bad,
        tiles=tiles,
        workspace=workspace,
    )
    found = list(zip(ids.tolist(), logprobs.tolist(), bad.tolist(), strict=True))
    del masks  # Only now, because the kernels read them.
    return found


def check(logits, specs, tiles=SMALL, greedy=False, workspace=None):
    expected = sample(logits.float().clone(), specs)
    for spec, row, drawn in zip(
        specs, by_kernel(logits, specs, tiles, greedy, workspace), expected, strict=True
    ):
        assert row[0] == drawn.id, (spec, row, drawn)
        assert row[1] == pytest.approx(drawn.logprob, rel=2e-5, abs=2e-5), spec
        assert row[2] == 0


def plain(**sampling) -> SampleSpec:
    return SampleSpec(TokenRule(), SamplingParams(**sampling), 0)


def random_mask(rng: random.Random, vocab: int, left: set[int]) -> bytes | None:
    """None, or a mask that allows at least one id of ``left``."""
    if rng.random() < 0.6:
        return None
    share = rng.choice([0.02, 0.3, 0.9])
    kept = np.array([rng.random() < share for _ in range(8 * TokenRule.mask_bytes(vocab))])
    kept[rng.choice(sorted(left))] = True
    return np.packbits(kept, bitorder="little").tobytes()


def random_spec(rng: random.Random, vocab: int) -> SampleSpec:
    allowed = (
        tuple(rng.sample(range(vocab), rng.choice([2, 5, 16]))) if rng.random() < 0.3 else None
    )
    suppressed = (
        tuple(rng.sample(range(vocab), rng.choice([1, 2, 8]))) if rng.random() < 0.4 else ()
    )
    if allowed is not None and not set(allowed) - set(suppressed):
        suppressed = ()
    rule = TokenRule(
        allowed=allowed,
        suppressed=suppressed,
        otherwise=rng.randrange(vocab) if rng.random() < 0.2 else None,
        stop=rng.randrange(vocab),
        mask=random_mask(rng, vocab, set(allowed or range(vocab)) - set(suppressed)),
    )
    # No top_p that a sum of few equal weights meets exactly: there the last bit of a sum decides.
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.5, 1.0, 2.0, 100.0, 1e-3]),
        top_p=rng.choice([1.0, 1.0, 0.9017351, 0.3071153, 0.0123711]),
        top_k=rng.choice([0, 0, 1, 3, 17, 10**6]),
        seed=rng.randrange(2**63),
    )
    return SampleSpec(rule, sampling, rng.randrange(50))


@pytest.mark.parametrize("kind", ["normal", "rounded", "equal", "flat", "outlier", "float16"])
def test_draws_are_those_of_the_reference_sampler(kind):
    rows, rounds = (2, 1) if DEVICE == "cpu" else (64, 20)
    rng = random.Random(kind)
    generator = torch.Generator().manual_seed(len(kind))
    for _ in range(rounds):
        vocab = rng.choice([40, 100, 150])
        logits = 3 * torch.randn(rows, vocab, generator=generator)
        if kind == "rounded":
            logits = logits.round()
        elif kind == "equal":
            logits = torch.full((rows, vocab), -0.0)
        elif kind == "flat":
            logits = 5 + 1e-6 * logits
        elif kind == "outlier":
            logits[:, 7] = rng.choice([1e30, -1e30, 100.0])
        elif kind == "float16":
            logits = logits.half()
        check(logits, [random_spec(rng, vocab) for _ in range(rows)])


@pytest.mark.parametrize(
    "short, listed, is_wide",
    [
        (1024, 1024, False),
        (128, 512, True),
        pytest.param(2, 512, True, marks=pytest.mark.slow),
        (2, 2, True),
    ],
    ids=["a short list", "stretches cut again", "a long list", "the whole row"],
)
def test_every_way_to_a_draw(short, listed, is_wide):
    vocab = 300
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(3))
    specs = [
        plain(temperature=2.0, top_p=p, top_k=k, seed=9) for p, k in ((0.8, 0), (1, 90), (0.7, 99))
    ]
    tiles = SMALL._replace(short=short, listed=listed)
    work = kernel.allocate(3, vocab, DEVICE, tiles)
    # Twice, for the counters: where programs count is over before a list is sorted.
    for _ in range(2 if short > 2 else 1):
        check(logits, specs, tiles, workspace=work)
        number, was_cut_again, arrived = work.listed.unbind(1)
        assert (was_cut_again == is_wide).all(), number
        assert ((number <= listed) == (listed > 2)).all(), number
        assert ((number <= short) == (short > 2)).all(), number
        assert (arrived == 0).all()


def test_a_full_list_leaves_its_neighbours_alone():
    logits = torch.full((4, 300), -100.0)
    for i, row in enumerate(logits):
        row[: 126 + i] = 0
    specs = [plain(temperature=1.0, top_k=60, seed=i) for i in range(4)]
    tiles = SMALL._replace(short=128, listed=128)
    work = kernel.allocate(4, 300, DEVICE, tiles)
    check(logits, specs, tiles, workspace=work)
    numbers = work.listed[:, 0].tolist()
    assert numbers == [126, 127, 128, 129]
    with pytest.raises(AssertionError, match="short=256, listed=128"):
        check(logits, specs, tiles._replace(short=256))


@pytest.mark.slow
def test_a_flat_row_is_not_searched_whole():
    vocab = 51200
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).bfloat16()
    # One program lists what many do, and is interpreted sooner.
    tiles = kernel.SamplingTiles(chunk=65536) if DEVICE == "cpu" else kernel.SamplingTiles()
    work = kernel.allocate(1, vocab, DEVICE, tiles)
    check(logits, [plain(temperature=1.0, top_p=0.9, seed=7)], tiles, workspace=work)
    number, was_cut_again, _arrived = work.listed[0].tolist()
    assert was_cut_again
    assert tiles.short < number <= tiles.listed


def test_more_equal_logits_than_a_list_has_room_for():
    logits = torch.zeros(2, 100)
    logits[:, 7] = 1.0
    specs = [
        plain(temperature=1.0, top_p=p, top_k=k, seed=4) for p, k in ((0.8017, 0), (0.9017, 60))
    ]
    check(logits, specs, SMALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_greedy_takes_the_first_of_the_best(dtype):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[0, [250, 70, 130]] = 9.0
    logits[1] = 0.0
    logits[1, ::2] = -0.0
    rules = [
        TokenRule(),
        TokenRule(suppressed=(0,)),
        TokenRule(allowed=(299, 4)),
        TokenRule(otherwise=5, stop=9),
    ]
    specs = [SampleSpec(rule, SamplingParams(), 0) for rule in rules]
    check(logits, specs, greedy=True)
    assert [row[0] for row in by_kernel(logits, specs, greedy=True)][:2] == [70, 1]


def test_rounding_errors_of_the_logits_change_no_draw():
    rows, vocab = (4, 100) if DEVICE == "cpu" else (256, 100)
    generator = torch.Generator().manual_seed(1)
    halves = torch.randn(rows, vocab // 2, generator=generator)
    logits = torch.cat([halves, halves + 1e-6], dim=1)
    other = logits + 2e-6 * torch.rand(rows, vocab, generator=generator)
    cuts = [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_p": 0.8, "top_k": 60}]
    specs = [plain(temperature=4.0, seed=i, **cuts[i % 4]) for i in range(rows)]
    first, second = by_kernel(logits, specs), by_kernel(other, specs)
    assert [row[0] for row in first] == [row[0] for row in second]
    check(logits, specs)


def test_a_probable_stop_and_a_suppressed_one():
    logits = torch.zeros(3, 20)
    logits[:, 4] = torch.tensor([30.0, 2.0, 2.0])
    specs = [
        SampleSpec(rule, SamplingParams(temperature=1.0, seed=2), 0)
        for rule in (
            TokenRule(otherwise=7, stop=4),
            TokenRule(otherwise=7, stop=4, suppressed=(4,)),
            TokenRule(otherwise=4, stop=7),
        )
    ]
    check(logits, specs)


@pytest.mark.parametrize("greedy", [True, False])
def test_forced_rows_look_at_no_logits(greedy):
    logits = torch.full((1, 20), math.nan)
    sampling = SamplingParams(temperature=0.0 if greedy else 1.0)
    spec = SampleSpec(TokenRule(forced=13), sampling, 0)
    assert by_kernel(logits, [spec], greedy=greedy) == [(13, 0.0, 0)]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named_and_spoil_no_others(greedy, value):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    good = logits.clone()
    logits[1, 66] = value
    sampling = SamplingParams(temperature=0.0 if greedy else 0.7, top_p=0.9017, seed=3)
    # Suppressed or not, a bad logit is bad.
    specs = [SampleSpec(TokenRule(suppressed=(66,)), sampling, i) for i in range(3)]
    rows = by_kernel(logits, specs, greedy=greedy)
    assert [row[2] for row in rows] == [0, 1, 0]
    assert 0 <= rows[1][0] < 100
    expected = sample(good, specs)
    assert [rows[0][0], rows[2][0]] == [expected[0][0], expected[2][0]]


def test_a_tiny_temperature_is_greedy_and_a_stride_is_followed():
    wide = torch.randn(2, 256, generator=torch.Generator().manual_seed(5))
    specs = [plain(temperature=1e-300, seed=1), plain(temperature=0.3, seed=8)]
    check(wide[:, :100], specs)


def test_the_default_tiles_and_a_kept_workspace():
    logits = torch.randn(2, 1500, generator=torch.Generator().manual_seed(6))
    check(logits, [plain(temperature=1.0, seed=4), plain(temperature=0.5, top_p=0.3071)], None)
    work = kernel.allocate(8, 1500, DEVICE)
    assert work.stats.shape == (8, 2, 3)
