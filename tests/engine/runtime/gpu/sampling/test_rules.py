from dataclasses import replace

import numpy as np
import pytest
import torch

from kestrel_engine.models.region import coord_of_bin, size_of_bins
from kestrel_engine.types.model_config import parse_model_config
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import LogitEdit, SampleSpec, StepToken, TokenRule, noise_key

rules = pytest.importorskip("kestrel_engine.runtime.gpu.sampling.rules")

CONFIG = parse_model_config({}, family="moondream2")
COORD, SIZE = CONFIG.ids.coord_id, CONFIG.ids.size_id


def host_arrays(rows: int) -> dict[str, np.ndarray]:
    """As they come round again: full of old values."""
    return {
        "rules": np.full((rows, rules.RULE_WIDTH), 77, np.int32),
        "temperature": np.full(rows, 7.0),
        "top_p": np.full(rows, 7.0),
        "top_k": np.full(rows, 77, np.int32),
        "noise": np.full(rows, 7),
    }


def spec(rule: TokenRule, draw: int = 0, **sampling) -> SampleSpec:
    return SampleSpec(rule, SamplingParams(**sampling), draw)


def test_a_rule_as_numbers():
    rule = TokenRule(
        allowed=(3, 9, 4), suppressed=(9,), otherwise=5, stop=3, read_coord=True, read_size=True
    )
    row = rules.encode_rule(rule).tolist()
    assert row[:6] == [-1, 5, 3, 1, 3, 3]
    assert row[8:9] == [9] and row[16:19] == [3, 9, 4]
    assert len(row) == rules.RULE_WIDTH
    forced = rules.encode_rule(TokenRule(forced=0, suppressed=(1,) * 20, read_size=True)).tolist()
    assert forced[0] == 0 and forced[3:5] == [0, 0] and forced[5] == rules.READS_SIZE


def test_a_rule_that_forbids_everything_is_a_mistake():
    with pytest.raises(AssertionError, match="forbids every id"):
        rules.encode_rule(TokenRule(allowed=(1, 2), suppressed=(2, 1)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (TokenRule(), True),
        (TokenRule(suppressed=tuple(range(8)), allowed=tuple(range(16))), True),
        (TokenRule(suppressed=tuple(range(9))), False),
        (TokenRule(allowed=tuple(range(17))), False),
    ],
)
def test_what_fits(rule, expected):
    assert rules.fits(rule) is expected


def test_rows_are_filled_and_padding_is_forced():
    encoder, host = rules.RuleEncoder(64), host_arrays(5)
    first, second = TokenRule(suppressed=(3,)), TokenRule(stop=9, read_coord=True)
    specs = [
        spec(first),
        spec(second, 4, temperature=0.5, top_p=0.3, top_k=10**400, seed=2**63 - 1),
        spec(TokenRule(suppressed=(3,)), 1, temperature=0.1, top_k=7),
    ]
    assert encoder.encode(specs, host, 4) == [] and not encoder.odd
    expected = [*map(rules.encode_rule, (first, second, first, TokenRule(forced=0)))]
    assert np.array_equal(host["rules"][:4], expected)
    assert host["temperature"].tolist() == [0.0, 0.5, 0.1, 0.0, 7.0]
    assert host["top_p"].tolist() == [1.0, 0.3, 1.0, 1.0, 7.0]
    assert host["top_k"].tolist() == [0, 2**31 - 1, 7, 0, 77]
    assert host["noise"].view(np.uint64).tolist() == [
        0,
        noise_key(2**63 - 1, 4),
        noise_key(0, 1),
        0,
        7,
    ]
    assert (host["rules"][4] == 77).all()


def test_rows_that_the_kernels_cannot_draw_are_named_and_read_what_they_read():
    encoder, host = rules.RuleEncoder(64), host_arrays(3)
    edited = TokenRule(mask=bytes(8), edits=(LogitEdit(3, bias=1.0),), read_coord=True)
    odd = spec(edited, temperature=1.0)
    assert encoder.encode([spec(TokenRule()), odd, odd], host, 3) == [1, 2]
    assert encoder.odd == {1: odd, 2: odd} and encoder.masks == {}
    assert np.array_equal(host["rules"][1], rules.encode_rule(TokenRule(read_coord=True)))
    assert host["temperature"].tolist() == [0.0, 0.0, 0.0]
    assert encoder.encode([spec(TokenRule())], host, 1) == [] and encoder.odd == {}
    # Min-p counts only where a row draws.
    masked = TokenRule(mask=bytes([255] * 8))
    rows = [spec(masked, temperature=1.0, min_p=0.1), spec(masked, min_p=0.1)]
    assert encoder.encode(rows, host, 2) == [0]
    assert [*encoder.masks] == [1]


def test_long_lists_and_masks_become_masks_with_an_address():
    encoder, host = rules.RuleEncoder(60), host_arrays(4)
    long = TokenRule(allowed=tuple(range(20, 60)), suppressed=(21, 59), otherwise=7, stop=59)
    masked = TokenRule(mask=bytes([0b101] * 8), suppressed=(2,), read_coord=True)
    both = TokenRule(mask=bytes([0b101] * 8), suppressed=tuple(range(10)))
    many = [spec(long), spec(TokenRule()), spec(masked), spec(both, temperature=1.0)]
    assert encoder.encode(many, host, 4) == []
    assert host["temperature"].tolist() == [0.0, 0.0, 0.0, 1.0]
    addresses = [0x7F00_8000_0040, 2**62 + 2**31, 0x1_0000_0000]
    encoder.point_to_masks(host, addresses)
    found = np.ascontiguousarray(host["rules"][:, 32:34]).view(np.int64)[:, 0].tolist()
    assert found == [addresses[0], 0, addresses[1], addresses[2]]
    assert [*encoder.masks] == [0, 2, 3]

    def ids(mask: bytes) -> list[int]:
        return np.flatnonzero(
            np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        ).tolist()

    assert ids(encoder.masks[0]) == [20, *range(22, 59)]
    assert encoder.masks[2] == masked.mask
    assert ids(encoder.masks[3]) == [i for i in range(10, 64) if i % 8 in (0, 2)]
    assert host["rules"][0, :6].tolist() == [-1, 7, 59, 0, 0, 0]
    assert host["rules"][2, :6].tolist() == [-1, -1, masked.stop, 1, 0, rules.READS_COORD]
    # Without masks, no address of the step before is left.
    encoder.encode([spec(TokenRule())], host, 4)
    assert not host["rules"][:, 32:].any()


def test_a_long_list_that_forbids_everything_is_a_mistake():
    encoder, host = rules.RuleEncoder(60), host_arrays(1)
    rule = TokenRule(allowed=tuple(range(20)), suppressed=tuple(range(20)))
    with pytest.raises(AssertionError, match="forbids every id"):
        encoder.encode([spec(rule)], host, 1)


def test_any_number_of_different_rules():
    encoder, host = rules.RuleEncoder(64), host_arrays(100)
    for begin in range(0, 9000, 100):
        specs = [spec(TokenRule(suppressed=(i,))) for i in range(begin, begin + 100)]
        encoder.encode(specs, host, 100)
        assert host["rules"][:, 8].tolist() == [*range(begin, begin + 100)]


def results(*rows: tuple[int, ...]) -> torch.Tensor:
    """id, bad, coord bin, width bin, height bin. The id's log-probability is -0.5, and the probabilities near the
    values are 0.25 and 0.75."""
    made = torch.zeros(len(rows), 8, dtype=torch.int32)
    floats = made.view(torch.float32)
    for index, (token, bad, *bins) in enumerate(rows):
        made[index, 0], made[index, 1] = token, bad
        made[index, 3:6] = torch.tensor(bins)
        floats[index, 2], floats[index, 6], floats[index, 7] = -0.5, 0.25, 0.75
    return made


def test_tokens_and_values():
    reading = TokenRule(read_coord=True, read_size=True)
    specs = [spec(TokenRule()), *[spec(reading)] * 3, spec(TokenRule(read_size=True))]
    found = rules.decode_results(
        results((COORD, 0, 3, 4, 5), (COORD, 0, 3, 4, 5), (SIZE, 0, 3, 4, 5), (9, 0, 3, 4, 5),
                (COORD, 0, 3, 4, 5)),
        specs,
        CONFIG,
    )  # fmt: skip
    assert found == [
        StepToken(COORD, None, -0.5),
        StepToken(COORD, coord_of_bin(3), -0.5, 0.25),
        StepToken(SIZE, size_of_bins(4, 5), -0.5, 0.75),
        StepToken(9, None, -0.5),
        StepToken(COORD, None, -0.5),
    ]


def test_the_likeliest_ids_of_rows_that_ask_for_them():
    asking = [TokenRule(top=2), TokenRule(), TokenRule(top=3), TokenRule(forced=4, top=3)]
    tops = [
        rules.encode_top([(7, -0.5), (8, -1.0)]),
        rules.encode_top([(5, -2.0)]),
        rules.encode_top([(9, -0.25)]),
        rules.encode_top([(5, -2.0)]),
    ]
    found = rules.decode_results(
        results(*[(7, 0, 0, 0, 0)] * 4),
        [spec(rule) for rule in asking],
        CONFIG,
        torch.from_numpy(np.stack(tops)),
    )
    assert [token.top for token in found] == [((7, -0.5), (8, -1.0)), (), ((9, -0.25),), ()]
    assert rules.encode_rule(TokenRule(top=3))[6] == 3
    assert rules.encode_rule(TokenRule(forced=1, top=3))[6] == 0


def test_bins_are_those_of_the_model():
    config = replace(CONFIG, region=replace(CONFIG.region, coord_out_dim=64, size_out_dim=256))
    specs = [spec(TokenRule(read_coord=True)), spec(TokenRule(read_size=True))]
    found = rules.decode_results(results((COORD, 0, 63, 0, 0), (SIZE, 0, 0, 127, 0)), specs, config)
    assert [token.value for token in found] == [coord_of_bin(63, 64), size_of_bins(127, 0, 128)]


def test_a_bad_row_has_no_token():
    found = rules.decode_results(
        results((1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (COORD, 1, 3, 0, 0)),
        [spec(TokenRule()), spec(TokenRule()), spec(TokenRule(read_coord=True))],
        CONFIG,
    )
    assert found == [StepToken(1, None, -0.5), None, None]
