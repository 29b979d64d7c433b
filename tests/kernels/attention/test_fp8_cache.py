"""Kernels over pools of float8_e4m3fn: what they store, and what they see of it, against plain torch."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.kernels.attention.paged_decode import DecodeConfig
from kestrel_engine.kernels.attention.paged_text import TILE_QUERIES, paged_text
from kestrel_engine.kernels.attention.rope_store import rope_store
from kestrel_engine.kernels.e4m3 import has_units
from tests.kernels.attention.attention_cases import Case, decode_reference, prepared, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SCALES = (0.3, 0.02)
E4M3 = torch.float8_e4m3fn
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(params=[False, True] if has_units(DEVICE) else [False], autouse=True)
def units(request, monkeypatch):
    """Both ways to widen, where the device has both."""
    for module in ("paged_decode", "paged_text"):
        monkeypatch.setattr(
            f"kestrel_engine.kernels.attention.{module}.has_units", lambda _: request.param
        )


def quantised(x, scale):
    return (x.float() * (1 / scale)).clamp(-448, 448).to(E4M3)


def real(x, scale):
    return x.double() * scale


def in_fp8(case):
    """The case with pools as stored, and with the same numbers in double precision."""
    stored = [quantised(x, s) for x, s in zip((case.keys, case.values), SCALES, strict=True)]
    numbers = [real(x, s) for x, s in zip(stored, SCALES, strict=True)]
    names = ("keys", "values")
    return (
        replace(case, **dict(zip(names, stored, strict=True))),
        replace(case, **dict(zip(names, numbers, strict=True))),
    )


def almost_equal(stored, numbers, scale):
    """Whether ``numbers`` were rounded to ``stored``; where they lie between two, float32 may see it otherwise."""
    step = 2.0 ** (numbers.div(scale).abs().clamp_min(2**-6).log2().floor() - 3)
    off = (real(stored, scale) - numbers.clamp(-448 * scale, 448 * scale)).abs()
    return bool((off <= 0.5001 * step * scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("head_dim", "rotary", "tau"), [(16, 8, True), (24, 24, False)])
def test_prompts_are_stored_rounded(head_dim, rotary, tau, dtype):
    g = torch.Generator().manual_seed(1)
    tokens, heads = 5, 3
    # The last tokens' keys and values are beyond what the type holds.
    size = torch.tensor([1.0, 0.01, 1.0, 500.0, 1.0])[:, None]
    qkv = (torch.randn(tokens, 3 * heads * head_dim, generator=g) * size).to(DEVICE, dtype)
    before = qkv.clone()
    positions = torch.tensor([0, 3, 31, 7, 8], device=DEVICE)
    slots = torch.tensor([11, 2, 0, 7, 5], device=DEVICE)
    angles = torch.outer(torch.arange(32.0), 100.0 ** -(torch.arange(rotary // 2) / rotary))
    cos, sin = angles.cos().to(DEVICE), angles.sin().to(DEVICE)
    factors = None
    if tau:
        content = torch.randn(tokens, 2 * heads, generator=g).to(DEVICE, dtype)
        factors = content, torch.randn(heads, generator=g).to(DEVICE)
    keys = torch.full((12, heads, head_dim), torch.nan, device=DEVICE).to(E4M3)
    values = keys.clone()

    rope_store(
        qkv, positions, slots, keys, values, cos, sin, tau=factors, scales=SCALES
    )  # fmt: skip

    q, k, v = prepared(before, heads, head_dim, cos, sin, positions, factors)
    assert almost_equal(keys[slots], k, SCALES[0]) and almost_equal(values[slots], v, SCALES[1])
    assert (values[slots].float().abs() == 448).any()
    # Image blocks attend to what stays here: not rounded.
    new_q, new_k, new_v = qkv.view(tokens, 3 * heads, head_dim).chunk(3, dim=1)
    for new, expected in ((new_q, q), (new_k, k), (new_v, v)):
        assert relative_error(new, expected) < LIMITS[dtype]
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots.cpu()] = False
    assert keys.cpu()[untouched].float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("splits", "config"),
    [
        (1, None),
        (3, DecodeConfig(2, 8, 4)),
        (4, DecodeConfig(4, 16, 4, stages=3)),
        (3, DecodeConfig(2, 16, 4, ahead=True)),
    ],
)
def test_a_step_sees_what_is_stored(splits, config, dtype):
    made = Case.make(
        [0, 1, 25, 40], page_size=5, tau=True, num_heads=3, head_dim=24, dtype=dtype, device=DEVICE
    )
    case, numbers = in_fp8(made)
    before = case.keys.clone()
    out = case.decoded(case.workspace(splits), splits=splits, scales=SCALES, config=config)
    _, k, v = decode_reference(numbers)
    own = case.own_slots()
    assert almost_equal(case.keys[own], k, SCALES[0])
    assert almost_equal(case.values[own], v, SCALES[1])
    # Attention sees the new token as it is stored, too: computed again from what there is now.
    expected = attended(case)
    assert relative_error(out, expected) < LIMITS[dtype]
    others = torch.ones(len(before), dtype=torch.bool)
    others[own.cpu()] = False
    bytes_after, bytes_before = case.keys.view(torch.uint8).cpu(), before.view(torch.uint8).cpu()
    assert torch.equal(bytes_after[others], bytes_before[others])


def attended(case):
    """[M, H*D] float64: each row's attention to the pool's positions 0..p."""
    q, _, _ = prepared(
        case.qkv, case.num_heads, case.head_dim, case.cos, case.sin, case.positions, case.tau
    )
    rows = []
    for row, position in enumerate(case.positions.tolist()):
        slots = case.slots(row, position + 1)
        k, v = real(case.keys[slots], SCALES[0]), real(case.values[slots], SCALES[1])
        scores = torch.einsum("hd,phd->hp", q[row], k) * case.head_dim**-0.5
        rows.append(torch.einsum("hp,phd->hd", scores.softmax(-1), v).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prompt_text_sees_what_is_stored(dtype):
    g = torch.Generator().manual_seed(4)
    heads, dim, page_size, start, count = 2, 24, 5, 37, 19
    length = start + count
    pages = torch.randperm(20, generator=g)[: -(-length // page_size)]
    at = torch.arange(length)
    slots = pages[at // page_size] * page_size + at % page_size
    pools = []
    for scale in SCALES:
        pool = torch.full((20 * page_size, heads, dim), torch.nan)
        pool[slots] = torch.randn(length, heads, dim, generator=g)
        pools.append(quantised(pool, scale))
    q = torch.randn(count, heads, dim, generator=g).to(dtype)
    tiles = [[0, 0, TILE_QUERIES, start], [0, TILE_QUERIES, count - TILE_QUERIES, start + TILE_QUERIES]]  # fmt: skip
    out = torch.full((count, heads * dim), torch.nan, dtype=dtype, device=DEVICE)
    paged_text(
        q.to(DEVICE),
        *(pool.to(DEVICE) for pool in pools),
        pages[None].to(DEVICE, torch.int32),
        torch.tensor(tiles, dtype=torch.int32, device=DEVICE),
        page_size=page_size,
        scales=SCALES,
        out=out,
    )
    k, v = (real(pool[slots], scale) for pool, scale in zip(pools, SCALES, strict=True))
    scores = torch.einsum("qhd,phd->hqp", q.double(), k) * dim**-0.5
    unseen = at[None] > start + torch.arange(count)[:, None]
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    expected = torch.einsum("hqp,phd->qhd", weights, v).flatten(1)
    assert relative_error(out.cpu(), expected) < LIMITS[dtype]
