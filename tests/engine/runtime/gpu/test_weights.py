import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.gpu.weights import (
    PADDED_PATCHES,
    pack_weights,
    packed_in,
    packed_out,
    running_sums,
)
from tests.engine.models.small import MOE, random_tensors, small_config


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_parts_keep_their_values_and_share_the_packed_memory(family):
    config = small_config(family)
    before, tensors = random_tensors(config), random_tensors(config)
    assert pack_weights(config, tensors) is tensors
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor), name
    dim, ff = config.text.dim, config.text.ff_dim
    for layer in range(config.text.n_layers):
        dense = family == "moondream2" or layer < MOE["start_layer"]
        rows = 3 * dim + (ff if dense else MOE["num_experts"])
        whole = tensors[f"{packed_in(layer)}.weight"]
        assert whole.shape == (rows, dim)
        assert tensors[f"{packed_in(layer)}.bias"].shape == (rows,)
        block = f"text.blocks.{layer}"
        assert tensors[f"{block}.attn.qkv.weight"].data_ptr() == whole.data_ptr()
        beside = "fc1" if dense else "router"
        whole[-1, 0] = 7.0
        assert tensors[f"{block}.mlp.{beside}.weight"][-1, 0] == 7.0
        name = f"{packed_out(layer)}.weight"
        assert (name in tensors) == dense
        if dense:
            assert tensors[name].shape == (dim, dim + ff)
            tensors[name][0, -1] = 8.0
            assert tensors[f"{block}.mlp.fc2.weight"][0, -1] == 8.0
            assert tensors[f"{block}.attn.proj.weight"].data_ptr() == tensors[name].data_ptr()


def test_patches_are_padded_with_zeros():
    config = small_config("moondream2")
    tensors = pack_weights(config, random_tensors(config))
    padded = tensors[PADDED_PATCHES]
    assert padded.shape == (24, 112)  # 3 * 6 * 6 = 108
    assert torch.equal(padded[:, 108:], torch.zeros(24, 4))
    assert tensors["vision.patch_emb.weight"].data_ptr() == padded.data_ptr()


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_the_plain_model_computes_the_same_over_packed_weights(family):
    config = small_config(family)
    plain = Moondream(config, random_tensors(config))
    packed = Moondream(config, pack_weights(config, random_tensors(config)))
    u = torch.randn(5, config.text.dim)
    for before, after in zip(plain.text.blocks, packed.text.blocks, strict=True):
        torch.testing.assert_close(after.qkv(u), before.qkv(u))
        torch.testing.assert_close(after.proj(u), before.proj(u))
        torch.testing.assert_close(after.mlp(u), before.mlp(u))
    crops = torch.randint(0, 256, (2, 30, 30, 3), dtype=torch.uint8)
    torch.testing.assert_close(packed.vision.encode_crops(crops), plain.vision.encode_crops(crops))


def test_packing_twice_changes_nothing():
    config = small_config("moondream3")
    tensors = pack_weights(config, random_tensors(config))
    once = dict(tensors)
    pack_weights(config, tensors)
    assert list(tensors) == list(once)
    assert all(tensors[name] is once[name] for name in once)


def test_running_sums_are_float32():
    biases = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 0.5)]
    sums = running_sums(biases)
    assert [float(total[0]) for total in sums] == [256.0, 257.0, 257.5]
    assert all(total.dtype == torch.float32 for total in sums)
