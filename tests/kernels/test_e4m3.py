"""Eight-bit floats in kernels against torch's own conversions."""

import pytest
import torch
import triton
import triton.language as tl

from kestrel_engine.kernels.e4m3 import as_bytes, decode_e4m3, encode_e4m3, has_units

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNITS = [False, True] if has_units(DEVICE) else [False]


@triton.jit
def _encode(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, encode_e4m3(tl.load(x + at, mask=at < count)), mask=at < count)


@triton.jit
def _decode(x, out, UNITS: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, decode_e4m3(tl.load(x + at), UNITS))


def encode(x):
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    _encode[(triton.cdiv(len(x), 4096),)](x, as_bytes(out), len(x), BLOCK=4096)
    return out


@pytest.mark.parametrize("units", UNITS)
def test_every_byte_becomes_its_number(units):
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](every, out, UNITS=units)
    expected = every.view(torch.float8_e4m3fn).float()
    assert torch.equal(out.nan_to_num(1e9), expected.nan_to_num(1e9))
    assert torch.equal((out < 0) | (1 / out < 0), (expected < 0) | (1 / expected < 0))


def test_rounding_is_torchs():
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (numbers[1:] + numbers[:-1]) / 2
    near = [between, numbers]
    for around in (between, numbers):
        near += [around.nextafter(torch.tensor(side)) for side in (-1e9, 1e9)]
    g = torch.Generator().manual_seed(0)
    near.append(torch.randn(20_000, generator=g) * torch.logspace(-5, 2.9, 20_000))
    x = torch.cat(near).clamp(-448, 448)
    x = torch.cat([x, -x, torch.tensor([1e-45, -1e-45, 0.0, -0.0])]).to(DEVICE)
    assert torch.equal(as_bytes(encode(x)), as_bytes(x.to(torch.float8_e4m3fn)))


def test_what_is_too_large_is_the_largest_and_nan_stays():
    x = torch.tensor([448.0, 449.0, 464.0, 480.0, 1e30, torch.inf], device=DEVICE)
    assert (encode(x).float() == 448).all() and (encode(-x).float() == -448).all()
    assert encode(torch.tensor([torch.nan, -torch.nan], device=DEVICE)).float().isnan().all()


def test_other_types_stay_as_they_are():
    wide = torch.zeros(3)
    assert as_bytes(wide) is wide
    assert not has_units(torch.device("cpu"))
