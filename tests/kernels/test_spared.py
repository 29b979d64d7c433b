"""Multiprocessors that persistent kernels leave free."""

import threading
from types import SimpleNamespace

import pytest
import torch

from kestrel_engine.kernels import spared as spared_module
from kestrel_engine.kernels.spared import hopper_multiprocessors, spared, sparing

gluon_support = pytest.importorskip("kestrel_engine.kernels.gluon_support")

CARD = torch.device("cuda:0")


def test_a_thread_spares_for_itself_until_the_context_ends():
    elsewhere = []
    with sparing(16), sparing(8):
        assert spared() == 8
        other = threading.Thread(target=lambda: elsewhere.append(spared()))
        other.start()
        other.join()
    assert elsewhere == [0]
    with pytest.raises(ValueError, match="inside"), sparing(4):
        raise ValueError("inside")
    assert spared() == 0


def test_persistent_kernels_have_fewer_programs(monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gluon_support.triton, "__version__", "3.6.0")
    caches = gluon_support.is_supported, spared_module.of_hopper
    for cached in caches:
        cached.cache_clear()
    try:
        for count, left in ((16, 116), (0, 132)):
            with sparing(count):
                assert hopper_multiprocessors(CARD) == left
                assert gluon_support.hopper_programs(CARD) == left
    finally:
        for cached in caches:
            cached.cache_clear()
    with sparing(16):
        assert gluon_support.hopper_programs(torch.device("cpu")) == 0
