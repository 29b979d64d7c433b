"""What a device can do follows from its compute capability; libraries are found without being needed."""

from types import SimpleNamespace

import pytest
import torch

from kestrel_engine import ConfigError
from kestrel_engine.runtime.gpu.device import capabilities, library_version, require_supported

CUDA = torch.device("cuda:0")


@pytest.fixture
def card(monkeypatch):
    def card(major, minor, **more):
        found = SimpleNamespace(
            name=f"card {major}{minor}",
            major=major,
            minor=minor,
            multi_processor_count=132,
            shared_memory_per_block=49152,
            total_memory=8 * 2**30,
            **more,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return card


@pytest.mark.parametrize(
    ("capability", "fp8"),
    [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)],
)
def test_capabilities_follow_from_the_generation(card, capability, fp8):
    card(*capability, shared_memory_per_block_optin=166912)
    found = capabilities(CUDA)
    assert found.fp8 == fp8
    assert (found.num_sms, found.memory) == (132, 8 * 2**30)
    assert found.shared_memory_per_block == 166912, "what a kernel may ask for, not the default"
    require_supported(CUDA)


def test_a_torch_that_does_not_tell_the_larger_limit(card):
    card(8, 0)
    assert capabilities(CUDA).shared_memory_per_block == 49152


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_an_older_card_is_refused_by_name(card, capability):
    card(*capability)
    with pytest.raises(ConfigError) as caught:
        require_supported(CUDA)
    assert caught.value.field == "device"
    assert f"card {capability[0]}{capability[1]} of compute capability" in str(caught.value)


def test_libraries_that_are_there_absent_and_broken(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kestrel_has_version.py").write_text("__version__ = '1.2'")
    (tmp_path / "kestrel_is_broken.py").write_text("import kestrel_its_own_dependency")
    (tmp_path / "kestrel_raises.py").write_text("raise RuntimeError('no driver')")
    library_version.cache_clear()
    assert library_version("kestrel_has_version") == "1.2"
    assert library_version("kestrel_absent") is None
    assert not caplog.records
    assert library_version("kestrel_is_broken") is None
    assert "kestrel_is_broken is installed but can't be imported" in caplog.text
    assert library_version("kestrel_raises") is None
    assert "no driver" in caplog.text
    assert library_version("torch") == torch.__version__
