import pytest

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.checkpoint.weights.names import (
    TensorPart,
    TensorSource,
    detect_family,
    map_names,
)
from kestrel_engine.errors import CheckpointError
from kestrel_engine.types.model_config import Family, parse_model_config

BLOCK = "text_model.transformer.h.5"


def test_every_released_name_of_either_scheme_is_known(family: Family, schemes) -> None:
    import torch

    config = parse_model_config({}, family=family)
    shapes = expected_tensors(config)
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    for write in schemes.values():
        found = map_names(write(empty))
        assert found.tensors.keys() == shapes.keys()
        assert not found.unknown and not found.ignored
        assert detect_family(found.tensors) == family


def test_transposed_and_fused_tensors() -> None:
    name = "region_model.size_features.weight"
    assert map_names([name]).tensors["region.size_features"] == TensorSource(
        name, TensorPart.TRANSPOSED
    )
    fused = map_names([f"{BLOCK}.tau_wqwv"]).tensors
    assert fused["text.blocks.5.attn.tau.wq"].part is TensorPart.FIRST_ROWS
    assert fused["text.blocks.5.attn.tau.wv"].part is TensorPart.LAST_ROWS


def test_compiled_names_lose_the_wrapper() -> None:
    found = map_names(["model.text._orig_mod.blocks.0.ln.weight", "_orig_mod.text.wte"])
    assert set(found.tensors) == {"text.blocks.0.ln.weight", "text.wte"}


@pytest.mark.parametrize(
    "pair",
    [
        ("model.text.wte", "model._orig_mod.text.wte"),
        ("model.text.wte", "text_model.transformer.embd.wte.weight"),
        (f"{BLOCK}.tau_wqwv", f"{BLOCK}.tau_wq"),
        (f"{BLOCK}.moe_quant.up_scale", "text.blocks.5.moe_quant.up_scale"),
        (f"{BLOCK}.kv_quantizer.k_scale", "text.blocks.5.attn.kv_quantizer.k_scale"),
    ],
)
def test_two_names_of_one_tensor_clash(pair: tuple[str, str]) -> None:
    with pytest.raises(CheckpointError, match="mean the same tensor") as caught:
        map_names(pair)
    assert pair[0] in str(caught.value) and pair[1] in str(caught.value)


def test_scales_buffers_and_strangers_are_told_apart() -> None:
    found = map_names(
        [
            f"{BLOCK}.moe_quant.up_scale",
            f"{BLOCK}.moe_quant.down_scale",
            f"{BLOCK}.mixer.kv_quantizer.k_scale",
            f"{BLOCK}.kv_quantizer.bits",
            "model.text.freqs_cis",
            f"{BLOCK}.mixer.bogus.weight",
            "lm_head.weight",
        ]
    )
    assert found.scales == {
        "text.blocks.5.mlp.fc1.weight": f"{BLOCK}.moe_quant.up_scale",
        "text.blocks.5.mlp.fc2.weight": f"{BLOCK}.moe_quant.down_scale",
    }
    assert found.ignored == (f"{BLOCK}.kv_quantizer.bits", "model.text.freqs_cis")
    assert found.kv_scales == {"text.blocks.5.attn.k_scale": f"{BLOCK}.mixer.kv_quantizer.k_scale"}
    assert found.unknown == (f"{BLOCK}.mixer.bogus.weight", "lm_head.weight")
    assert not found.tensors


def test_the_scheme_does_not_decide_the_family() -> None:
    training_moondream2 = map_names(["region_model.coordinate_decoder.fc1.weight"])
    assert detect_family(training_moondream2.tensors) == "moondream2"
    assert detect_family(["text.blocks.4.mlp.router.weight"]) == "moondream3"
    assert detect_family(["text.wte"]) is None
