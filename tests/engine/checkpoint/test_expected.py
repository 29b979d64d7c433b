from math import prod

from kestrel_engine.checkpoint.weights.expected import OPTIONAL, expected_tensors
from kestrel_engine.types.model_config import parse_model_config

MD2 = parse_model_config({}, family="moondream2")
MD3 = parse_model_config({}, family="moondream3")


def test_moondream2_has_the_released_tensors_and_parameters() -> None:
    shapes = expected_tensors(MD2)
    assert len(shapes) == 592
    assert sum(map(prod, shapes.values())) == 1_927_237_104
    by_part = {
        part: sum(prod(shape) for name, shape in shapes.items() if name.startswith(part))
        for part in ("text.", "vision.proj_mlp.", "region.")
    }
    assert by_part == {
        "text.": 1_418_270_720,
        "vision.proj_mlp.": 35_661_824,
        "region.": 60_317_312,
    }
    assert shapes["text.wte"] == (51200, 2048)
    assert shapes["region.coord_decoder.fc1.weight"] == (8192, 2048)


def test_moondream3_has_the_released_tensors_and_parameters() -> None:
    shapes = expected_tensors(MD3)
    assert len(shapes) == 662
    assert len(shapes.keys() - OPTIONAL) == 660
    assert sum(map(prod, shapes.values())) == 9_268_626_928
    experts = [shape for name, shape in shapes.items() if ".mlp." in name and len(shape) == 3]
    assert sum(map(prod, experts)) == 8_053_063_680
    assert shapes["text.blocks.3.mlp.fc1.weight"] == (8192, 2048)
    assert shapes["text.blocks.4.mlp.fc1.weight"] == (64, 2048, 2048)
    assert shapes["text.blocks.4.mlp.fc2.weight"] == (64, 2048, 1024)
    assert shapes["text.blocks.0.attn.tau.wq"] == (32, 6144)
    assert shapes["vision.pos_emb"] == (1, 729, 1152)
    assert shapes["region.size_features"] == (2, 256)
