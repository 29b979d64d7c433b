"""Devices and versions of Triton whose kernels may be in Gluon."""

from types import SimpleNamespace

import pytest
import torch

from kestrel_engine.kernels import spared

gluon_support = pytest.importorskip("kestrel_engine.kernels.gluon_support")
moe_prefill = pytest.importorskip("kestrel_engine.kernels.moe.prefill")
moe_hopper = pytest.importorskip("kestrel_engine.kernels.moe.hopper")

CARD = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def asked_anew(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    gluon_support.is_supported.cache_clear()
    spared.of_hopper.cache_clear()
    yield
    gluon_support.is_supported.cache_clear()
    spared.of_hopper.cache_clear()


@pytest.mark.parametrize(
    ("version", "taken"), [("3.5.1", False), ("3.6.0", True), ("3.7.1+git", True), ("3.8.0", False)]
)
def test_other_tritons_have_the_kernels_of_all_cards(version, taken, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gluon_support.triton, "__version__", version)
    for _ in range(2):
        assert gluon_support.hopper_programs(CARD) == (132 if taken else 0)
        assert moe_prefill.hopper_kernels(CARD) is (moe_hopper if taken else None)
    assert len(caplog.records) == (0 if taken else 1), "it is said once"
    assert taken or version in caplog.text


def test_other_devices_have_the_kernels_of_all_cards(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    assert gluon_support.hopper_programs(CARD) == 0
    assert gluon_support.hopper_programs(torch.device("cpu")) == 0
    assert moe_prefill.hopper_kernels(CARD) is None
