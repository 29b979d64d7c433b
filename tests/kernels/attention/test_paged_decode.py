"""One new token a row against its pages, compared with plain torch in float64."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.kernels.attention import paged_decode as paged_decode_module
from kestrel_engine.kernels.attention.paged_decode import DecodeConfig, choose_splits, config_of
from tests.kernels.attention.attention_cases import Case, decode_reference, relative_error

pytestmark = pytest.mark.usefixtures("checked_addresses")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def decode(case, *, splits=1, config=None, width=None):
    """The kernel on copies of the case's tensors; also the pools afterwards."""
    rows, dim = len(case.positions), case.num_heads * case.head_dim
    workspace = case.workspace(splits)
    out = case.qkv.new_full((rows, width or dim), float("nan"))[:, :dim]
    keys, values = case.keys.clone(), case.values.clone()
    for _ in range(2):  # The second launch finds the counters as the first left them.
        case.decoded(workspace, splits=splits, out=out, keys=keys, values=values, config=config)
    assert not workspace.arrived.any()
    return out, keys, values


def check(case, **how):
    out, keys, values = decode(case, **how)
    expected, new_keys, new_values = decode_reference(case)
    limit = LIMITS[case.qkv.dtype]
    assert relative_error(out, expected) < limit
    own = case.own_slots()
    assert relative_error(keys[own], new_keys) < limit
    assert relative_error(values[own], new_values) < limit
    others = torch.ones(len(keys), dtype=torch.bool)
    others[own] = False
    assert torch.equal(keys[others].nan_to_num(7.0), case.keys[others].nan_to_num(7.0))
    assert torch.equal(values[others].nan_to_num(7.0), case.values[others].nan_to_num(7.0))


@pytest.mark.parametrize("page_size", [1, 5, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("splits", "tau"), [(1, False), (3, True)])
def test_every_page_size_and_split(page_size, splits, tau):
    # Lengths before, at and after the ends of pages, splits and blocks.
    case = Case.make([0, 1, 8, 9, 25, 40], page_size=page_size, tau=tau, device=DEVICE)
    check(case, splits=splits, config=DecodeConfig(2, 8, 4))


@pytest.mark.parametrize("merge", [4, 16])
@pytest.mark.parametrize("splits", [2, 16])
def test_any_number_of_splits_is_merged_at_a_time(merge, splits):
    case = Case.make([0, 39, 63], page_size=10, tau=True, device=DEVICE)
    check(case, splits=splits, config=DecodeConfig(4, 16, 4, merge=merge))


@pytest.mark.slow
def test_a_tile_read_ahead_gives_the_same_bits():
    case = Case.make([0, 15, 16, 17, 63], page_size=5, tau=True, device=DEVICE)
    for splits in (1, 3):
        plain = decode(case, splits=splits, config=DecodeConfig(2, 8, 4))
        ahead = decode(case, splits=splits, config=DecodeConfig(2, 8, 4, ahead=True))
        assert torch.equal(plain[0], ahead[0])
        check(case, splits=splits, config=DecodeConfig(2, 8, 4, ahead=True))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_read_ahead(rows, monkeypatch):
    case = Case.make([63, 0, 40][:rows], page_size=10, tau=True, device=DEVICE)
    chosen = []

    def config(*shape, **how):
        chosen.append(served(*shape, **how))
        return chosen[-1]

    served = paged_decode_module.config_of
    monkeypatch.setattr(paged_decode_module, "config_of", config)
    check(case, splits=16)
    assert chosen[0].ahead == (rows < 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("num_heads", "head_dim", "rotary"), [(4, 64, 32), (3, 24, 16), (1, 8, 4)])
def test_shapes_that_are_no_powers_of_two(num_heads, head_dim, rotary, dtype):
    case = Case.make(
        [3, 33, 12],
        page_size=13,
        tau=True,
        num_heads=num_heads,
        head_dim=head_dim,
        rotary=rotary,
        dtype=dtype,
        device=DEVICE,
    )
    check(case, splits=3)


def test_rows_may_lie_apart_and_columns_may_follow():
    case = Case.make([5, 21], page_size=5, tau=True, extra_columns=48, device=DEVICE)
    check(case, splits=2, width=400)


def test_the_output_may_take_the_place_of_v():
    for splits in (1, 3):
        case = Case.make([5, 21], page_size=5, tau=False, device=DEVICE)
        expected = decode_reference(case)[0]
        out = case.qkv[:, 2 * 64 : 3 * 64]
        case.decoded(case.workspace(splits), splits=splits, out=out)
        assert relative_error(out, expected) < LIMITS[torch.float32]


def test_every_configuration():
    case = Case.make([40, 11], page_size=10, tau=False, num_heads=2, head_dim=32, device=DEVICE)
    chosen = {
        config_of(rows, 32, dtype, units=units)
        for rows in (1, 4, 16)
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
        for units in (True, False)
    }
    for config in chosen:
        check(case, splits=3, config=config)


def test_padding_rows_touch_the_spare_sequence_only():
    case = Case.make([9, 0, 0, 0], page_size=10, tau=False, device=DEVICE, row_seq=[0, 1, 1, 1])
    out, keys, _ = decode(case, splits=3)
    expected, _, _ = decode_reference(case)
    assert relative_error(out[:1], expected[:1]) < 2e-6
    spare = case.own_slots()[1]
    changed = (keys.nan_to_num(7.0) != case.keys.nan_to_num(7.0)).flatten(1).any(1).nonzero()
    assert set(changed.flatten().tolist()) == {int(case.own_slots()[0]), int(spare)}


def test_a_result_is_the_same_each_time():
    case = Case.make([40, 31], page_size=10, tau=True, device=DEVICE)
    first, second = decode(case, splits=4)[0], decode(case, splits=4)[0]
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("units", [True, False])
def test_more_rows_take_fewer_splits(dtype, units):
    splits = [choose_splits(rows, 32, 64, dtype, units=units) for rows in (1, 4, 16, 64, 128)]
    assert splits == sorted(splits, reverse=True) and splits[0] == 16 and splits[-1] >= 1


def test_splits_of_bytes_are_those_that_were_measured():
    splits = [choose_splits(rows, 32, 64, torch.float8_e4m3fn) for rows in (1, 4, 16, 64)]
    assert splits == [16, 16, 8, 4]


def test_bytes_are_not_carried_from_round_to_round():
    assert not any(config_of(rows, 64, torch.float8_e4m3fn).ahead for rows in (1, 4, 16))
    assert config_of(1, 64, torch.bfloat16).ahead


def test_content_of_tau_may_come_in_parts():
    whole = Case.make([40, 11, 3], page_size=10, tau=True, device=DEVICE)
    assert whole.tau is not None
    content, alpha = whole.tau
    parts = torch.randn(37, *content.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    parts[-1] += content - parts.sum(0)
    divided = replace(whole, tau=(parts, alpha))
    assert relative_error(decode(divided, splits=2)[0], decode_reference(whole)[0]) < 1e-5
