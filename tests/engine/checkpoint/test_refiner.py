"""Refiners are found, loaded and refused: small ones of random values."""

import pytest
import torch
from safetensors.torch import save_file

from kestrel_engine import CheckpointError, ConfigError, DownloadError, RuntimeConfig
from kestrel_engine.checkpoint.hub import Hub
from kestrel_engine.checkpoint.refiner import load_refiner
from kestrel_engine.checkpoint.refiner_file import NAME, find_refiner
from kestrel_engine.models.refiner import RefinerConfig, refiner_shapes


@pytest.fixture
def vision(config_of):
    return config_of("moondream3").vision


@pytest.fixture
def tensors(vision):
    generator = torch.Generator().manual_seed(1)
    shapes = refiner_shapes(RefinerConfig(32, vision.enc_dim, vision.grid, 40))
    return {
        name: (torch.randn(shape, generator=generator) / 8).bfloat16()
        for name, shape in shapes.items()
    }


def load(file, vision, dtype=torch.float32):
    return load_refiner(file, vision, dtype=dtype, device="cpu")


@torch.inference_mode()
def refined(refiner, vision):
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(2, 1, vision.grid**2, vision.enc_dim, generator=generator)
    mask = torch.zeros(1, vision.crop_size, vision.crop_size)
    mask[:, 30:60, 20:90] = 1
    return refiner.refine(*features.to(refiner.dtype), mask)


def test_the_released_format_and_safetensors_load_alike(tmp_path, tensors, vision):
    torch.save({"head": tensors, "step": 5}, tmp_path / "model.pt")
    compiled = {
        name.replace("final_norm.", "final_norm._orig_mod."): t for name, t in tensors.items()
    }
    save_file(compiled, tmp_path / NAME)
    one, other = load(tmp_path / "model.pt", vision), load(tmp_path / NAME, vision)
    assert one.config == other.config == RefinerConfig(32, vision.enc_dim, vision.grid, 40)
    assert one.dtype == torch.float32
    assert torch.equal(refined(one, vision), refined(other, vision))
    half = load(tmp_path / NAME, vision, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert torch.isfinite(refined(half, vision)).all()


def test_all_faults_are_reported_at_once(tmp_path, tensors, vision):
    tensors["iou_token"] = tensors["iou_token"].T.contiguous()
    del tensors["final_norm.bias"]
    tensors["other"] = torch.zeros(1)
    save_file(tensors, tmp_path / NAME)
    with pytest.raises(
        CheckpointError, match=r"1 missing: final_norm.bias; 1 unexpected: other; 1 misshaped"
    ) as error:
        load(tmp_path / NAME, vision)
    assert "iou_token [32, 1] instead of [1, 32]" in str(error.value)


def test_values_that_are_not_finite_are_refused(tmp_path, tensors, vision):
    tensors["mask_tokens"][2, 3] = float("nan")
    save_file(tensors, tmp_path / NAME)
    with pytest.raises(CheckpointError, match="1 non-finite: mask_tokens"):
        load(tmp_path / NAME, vision)


def test_another_tower_is_refused(tmp_path, tensors, config_of, vision):
    save_file(tensors, tmp_path / NAME)
    import dataclasses

    with pytest.raises(CheckpointError, match=r"misshaped: image_proj\.weight"):
        load(tmp_path / NAME, dataclasses.replace(vision, enc_dim=48))


@pytest.mark.parametrize(
    "content", [{"a": torch.zeros(2)}, {"image_proj.weight": torch.zeros(20, 4, 1, 1)}]
)
def test_other_checkpoints_are_refused(tmp_path, content, vision):
    save_file(content, tmp_path / NAME)
    with pytest.raises(CheckpointError, match="refiner"):
        load(tmp_path / NAME, vision)


def test_the_file_beside_the_weights_is_found(tmp_path, config_of):
    files = (tmp_path / "model.safetensors",)
    segments, other = config_of("moondream3"), config_of("moondream2")
    hub = Hub(offline=True)
    assert find_refiner(RuntimeConfig(), segments, files, hub) is None
    file = tmp_path / NAME
    file.touch()
    assert find_refiner(RuntimeConfig(), segments, files, hub) == file
    assert find_refiner(RuntimeConfig(refiner="off"), segments, files, hub) is None
    assert find_refiner(RuntimeConfig(), other, files, hub) is None
    assert find_refiner(RuntimeConfig(), segments, (), hub) is None
    for named in (file, tmp_path):
        assert find_refiner(RuntimeConfig(refiner=named), segments, (), hub) == file


def test_a_refiner_that_cannot_be_used_is_an_error(tmp_path, config_of):
    hub = Hub(offline=True)
    with pytest.raises(ConfigError, match="path of a file that exists"):
        find_refiner(RuntimeConfig(refiner=tmp_path / "no.pt"), config_of("moondream3"), (), hub)
    (tmp_path / NAME).touch()
    with pytest.raises(ConfigError, match="models that segment"):
        find_refiner(RuntimeConfig(refiner=tmp_path), config_of("moondream2"), (), hub)


def test_a_refiner_that_is_not_downloaded_names_its_flag(tmp_path, config_of):
    hub = Hub(cache_dir=tmp_path, offline=True)
    released = RuntimeConfig(refiner="moondream/SegHeadRefiner")
    with pytest.raises(DownloadError, match=r"name model.pt with --refiner$"):
        find_refiner(released, config_of("moondream3"), (), hub)
