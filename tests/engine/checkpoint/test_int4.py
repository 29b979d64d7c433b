"""4-bit weights: the loader finds every order of the numbers, and each order gives the same values."""

import logging

import pytest
import torch

from kestrel_engine import CheckpointError
from kestrel_engine.checkpoint.files import find_files, read_headers
from kestrel_engine.checkpoint.weights.int4 import Order, dequantise, find_order, unpack
from kestrel_engine.checkpoint.weights.loader import check_values, load_planned, loaded_bytes
from kestrel_engine.checkpoint.weights.plan import plan_checkpoint
from kestrel_engine.models.weight_only import widened
from tests.checkpoint_loading import load_checkpoint
from tests.four_bit_checkpoint import GROUP, in_four_bits, pack, quantised, write


@pytest.mark.parametrize("order", list(Order))
def test_packing_and_unpacking(order):
    q = torch.randint(0, 16, (3, 6, 4), dtype=torch.uint8)
    assert torch.equal(unpack(pack(q, order), order), q)


@pytest.mark.parametrize("order", list(Order))
def test_a_checkpoint_in_any_order_loads(
    tmp_path, family, config_of, random_of, raw_of, order, caplog
):
    caplog.set_level(logging.INFO)
    stored, values = in_four_bits(random_of(config_of(family), torch.float32), order)
    loaded = load_checkpoint(write(tmp_path, stored, raw_of(family)))
    assert loaded.tensors.keys() == values.keys()
    for name, wanted in values.items():
        torch.testing.assert_close(loaded.tensors[name], wanted.float(), rtol=1e-6, atol=1e-6)
    assert f"4-bit weights: {order.value}" in caplog.text


def test_both_readers_and_the_check_give_the_same(tmp_path, config_of, random_of, raw_of):
    config = config_of("moondream3")
    stored, _ = in_four_bits(random_of(config, torch.float32), Order.INTERLEAVED)
    files = find_files(write(tmp_path, stored, raw_of("moondream3")))
    plan = plan_checkpoint(read_headers(files), config)
    mapped, ahead = (
        load_planned(plan, config, files, torch.bfloat16, "cpu", read_ahead=ahead)
        for ahead in (False, True)
    )
    assert all(torch.equal(mapped.tensors[name], ahead.tensors[name]) for name in mapped.tensors)
    assert check_values(plan, files) == ([], [], mapped.fingerprint)
    assert ahead.fingerprint == mapped.fingerprint


@pytest.mark.parametrize("order", list(Order))
def test_a_checkpoint_stays_in_four_bits_with_the_same_values(
    tmp_path, family, config_of, random_of, raw_of, order
):
    config = config_of(family)
    stored, _ = in_four_bits(random_of(config, torch.float32), order, group=16)
    files = find_files(write(tmp_path, stored, raw_of(family)))
    plan = plan_checkpoint(read_headers(files), config)
    kept, wide = (
        load_planned(plan, config, files, torch.float32, "cpu", narrow=narrow)
        for narrow in ("stored", "wide")
    )
    assert kept.fingerprint == wide.fingerprint
    device = torch.device("cpu")
    total = sum(loaded_bytes(i, torch.float32, device, False, "stored") for i in plan.tensors)
    assert total == sum(tensor.nbytes for tensor in kept.tensors.values())
    narrow = [name for name, tensor in kept.tensors.items() if tensor.dtype == torch.uint8]
    assert len(narrow) >= 4 and all(name.startswith("text.blocks.") for name in narrow)
    for name, wanted in wide.tensors.items():
        found = kept.tensors[name]
        if name in narrow:
            scales = kept.tensors[name.removesuffix(".weight") + ".scale"]
            outer = range(len(found)) if found.dim() == 3 else [...]
            matrices = [widened(found[i], scales[i], torch.float32) for i in outer]
            found = torch.stack(matrices).view(wanted.shape)
        assert torch.equal(found, wanted), name


def test_experts_may_be_packed_one_by_one_or_together(config_of, random_of):
    tensor = torch.randn(4, 8, 16)
    q, scale, zero = quantised(tensor)
    wanted = ((q.float() - zero) * scale).reshape(tensor.shape)
    for shape in ((4, -1), (-1,)):
        own = [x.reshape(*shape, x.shape[-1]) for x in (q, scale, zero)]
        packed = (pack(own[0], Order.HALVES), *own[1:])
        found = dequantise(packed, (4, 8, 16), Order.HALVES, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(found, wanted)


def test_an_order_that_does_not_show_is_assumed_or_refused(caplog):
    q = torch.randint(0, 16, (64, GROUP), dtype=torch.uint8)
    same = (pack(q, Order.HALVES), torch.ones(64, 1), torch.full((64, 1), 8.0))
    assert find_order([same], default=Order.HALVES) is Order.HALVES
    assert "assumed: halves, high nibbles first" in caplog.text
    with pytest.raises(CheckpointError, match="do not show the order"):
        find_order([same], default=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, n: t.pop(f"{n}.scale"), r"1 missing: text\..*scale"),
        (lambda t, n: t.pop(f"{n}.packed"), r"1 missing: .* 2 unexpected"),
        (lambda t, n: t.update({f"{n}.scale": t[f"{n}.scale"][:-1]}), "scale .* instead of"),
        (lambda t, n: t.update({f"{n}.packed": t[f"{n}.packed"].float()}), "F32 instead of 4-bit"),
        (lambda t, n: t.update({f"{n}.packed": t[f"{n}.packed"][:-1]}), "instead of 4-bit numbers"),
        (lambda t, n: t[f"{n}.scale"].fill_(float("nan")), "1 non-finite"),
        (lambda t, n: t.update({n: torch.zeros(2)}), "mean the same tensor"),
    ],
)
def test_faults_are_named(tmp_path, config_of, random_of, raw_of, change, message):
    stored, _ = in_four_bits(random_of(config_of("moondream2"), torch.float32), Order.HALVES)
    change(stored, "model.text.blocks.1.attn.qkv.weight")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(write(tmp_path, stored, raw_of("moondream2")))


@pytest.mark.parametrize("narrow", ["stored", "wide"])
def test_values_beyond_the_range_are_named(tmp_path, config_of, random_of, raw_of, narrow):
    """Scales and zero points are finite, and their product with a number is not."""
    config, name = config_of("moondream2"), "text.blocks.1.attn.qkv.weight"
    stored, _ = in_four_bits(random_of(config, torch.float32), Order.HALVES, group=16)
    stored[f"model.{name}.scale"][7] = 3e38
    files = find_files(write(tmp_path, stored, raw_of("moondream2")))
    plan = plan_checkpoint(read_headers(files), config)
    with pytest.raises(CheckpointError, match=rf"1 non-finite: model\.{name}\.packed"):
        load_planned(plan, config, files, torch.float32, "cpu", narrow=narrow)
    assert check_values(plan, files)[0] == [name]
