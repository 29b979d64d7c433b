"""Reading ahead gives the bytes that mapped files give, and says which file is broken."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine.checkpoint.config_file import config_beside
from kestrel_engine.checkpoint.files import find_files, read_headers
from kestrel_engine.checkpoint.safetensors_header import read_header
from kestrel_engine.checkpoint.weights import device_reader
from kestrel_engine.checkpoint.weights.device_reader import DeviceReader
from kestrel_engine.checkpoint.weights.finite import FiniteCheck, is_finite
from kestrel_engine.checkpoint.weights.loader import load_planned
from kestrel_engine.checkpoint.weights.plan import model_config_for, plan_checkpoint
from kestrel_engine.errors import CheckpointError
from tests.engine.checkpoint.conftest import same_bits

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that small files come in several pieces and few of them ahead."""
    monkeypatch.setattr(device_reader, "PIECE_BYTES", 1000)
    monkeypatch.setattr(device_reader, "CPU_AHEAD_BYTES", 5000)


@pytest.fixture
def stored(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(70, 33, generator=generator).to(torch.bfloat16),
        "b": torch.randn(5, 7, 11, generator=generator).to(torch.float8_e4m3fn),
        "c": torch.randn(1, generator=generator),
        "d": torch.randn(2000, generator=generator).to(torch.float16),
        "e": torch.randn(250, generator=generator).double(),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    torch.save(tensors | {"f": torch.randn(9, 4, generator=generator).t()}, tmp_path / "x.pt")
    return tmp_path, tensors


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_every_tensor_comes_as_it_is_stored_in_the_order_asked(stored, name):
    folder, tensors = stored
    headers = read_headers((folder / name,))
    wanted = [headers[n] for n in "dabacde"]
    with DeviceReader(wanted, CPU) as read:
        for one in wanted:
            got = read(one)
            assert got.shape == tensors[one.name].shape and same_bits(got, tensors[one.name])
    if name == "x.pt":
        with DeviceReader([headers["f"]], CPU) as read:
            assert read(headers["f"]).shape == (4, 9)


def test_no_more_lies_ahead_than_allowed(stored):
    folder, _ = stored
    headers = read_headers((folder / "x.safetensors",))
    wanted = [headers["a"]] * 20
    reader = DeviceReader(wanted, CPU)
    with reader as read:
        for one in wanted:
            read(one)
            ahead = sum(arriving.data.nbytes for arriving in reader.arriving)
            assert ahead < 5000 + 2 * 70 * 33


def test_places_are_those_of_the_format(stored):
    folder, tensors = stored
    file = folder / "x.safetensors"
    with file.open("rb") as opened:
        header, data = read_header(file, opened), file.read_bytes()
    assert header.tensors == read_headers((file,))
    for name, begin in header.begins.items():
        expected = tensors[name].view(torch.uint8).numpy().tobytes()
        assert data[begin : begin + len(expected)] == expected


def test_a_file_that_shrinks_is_named(stored):
    folder, _ = stored
    file = folder / "x.safetensors"
    headers = read_headers((file,))
    with open(file, "r+b") as opened:
        opened.truncate(file.stat().st_size - 100)
    wanted = list(headers.values())
    with (
        pytest.raises(CheckpointError, match=r"x\.safetensors: is damaged"),
        DeviceReader(wanted, CPU) as read,
    ):
        for one in wanted:
            read(one)


@pytest.mark.parametrize("header", [b"{", b"[1]", b'{"a": {}}'])
def test_a_broken_header_is_named(tmp_path, header):
    file = tmp_path / "y.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with file.open("rb") as opened, pytest.raises(CheckpointError, match=r"y\.safetensors"):
        read_header(file, opened)


@pytest.mark.parametrize("scheme", ["a", "b"])
def test_a_checkpoint_loads_alike_both_ways(
    tmp_path, family, scheme, config_of, random_of, raw_of, schemes
):
    tensors = schemes[scheme](random_of(config_of(family)))
    if scheme == "b" and family == "moondream3":
        for layer in range(3):
            head = f"text_model.transformer.h.{layer}"
            fused = [tensors.pop(f"{head}.tau_wq"), tensors.pop(f"{head}.tau_wv")]
            tensors[f"{head}.tau_wqwv"] = torch.cat(fused)
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw_of(family)))
    files = find_files(tmp_path)
    headers = read_headers(files)
    config = model_config_for(config_beside(files[0]), headers)
    plan = plan_checkpoint(headers, config)
    mapped, ahead = (
        load_planned(plan, config, files, torch.bfloat16, "cpu", read_ahead=ahead)
        for ahead in (False, True)
    )
    assert mapped.fingerprint == ahead.fingerprint
    assert mapped.tensors.keys() == ahead.tensors.keys()
    assert all(torch.equal(mapped.tensors[n], t) for n, t in ahead.tensors.items())


@pytest.mark.parametrize(
    ("dtype", "bits", "fine"),
    [
        (torch.float8_e4m3fn, 0x7F, False),
        (torch.float8_e4m3fn, 0xFF, False),
        (torch.float8_e4m3fn, 0xFE, True),
        (torch.float8_e5m2, 0x7C, False),
        (torch.float8_e5m2, 0xFD, False),
        (torch.float8_e5m2, 0xFB, True),
    ],
)
def test_eight_bits_that_are_no_number(dtype, bits, fine):
    data = torch.full((5000,), 0x3C, dtype=torch.uint8)
    data[4321] = bits
    assert is_finite(data.view(dtype)) is fine


def test_the_check_names_each_tensor_once():
    check = FiniteCheck()
    bad, good = torch.tensor([1.0, float("nan")]), torch.ones(3)
    assert check.nonfinite() == []
    check.add("x", good, bad, bad)
    check.add("y", good, torch.empty(0))
    check.add("z", -bad / 0)
    assert check.nonfinite() == ["x", "z"]
