"""clients/tools/comfyui_kestrel, imported and called as ComfyUI does. ComfyUI itself is not on PyPI."""

import importlib.util
import json
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kestrel_client import InvalidArgumentError, KestrelClient
from tests.code_blocks import ROOT

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"


@pytest.fixture(scope="module")
def nodes(server: str) -> ModuleType:
    path = ROOT / "clients/tools/comfyui_kestrel/__init__.py"
    spec = importlib.util.spec_from_file_location("custom_nodes_kestrel", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KESTREL_SERVER", server)
        module._client()
    return module


def pixels() -> np.ndarray:
    return np.asarray(Image.open(IMAGE).convert("RGB"))


def batch(number: int = 1) -> torch.Tensor:
    """[B, H, W, C] from 0 to 1, as ComfyUI's LoadImage gives it."""
    return torch.from_numpy(pixels().astype(np.float32) / 255).expand(number, -1, -1, -1)


def called(nodes: ModuleType, name: str, **inputs: Any) -> tuple[Any, ...]:
    """The node's outputs, after the checks that ComfyUI makes of a node."""
    node = nodes.NODE_CLASS_MAPPINGS[name]
    kinds = {key: kind for part in node.INPUT_TYPES().values() for key, kind in part.items()}
    assert set(inputs) <= set(kinds) and set(node.INPUT_TYPES()["required"]) <= set(inputs)
    outputs = getattr(node(), node.FUNCTION)(**inputs)
    assert isinstance(outputs, tuple)
    assert len(outputs) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    for kind, output, is_list in zip(node.RETURN_TYPES, outputs, node.OUTPUT_IS_LIST, strict=True):
        assert isinstance(output, list) == is_list
        if kind in ("IMAGE", "MASK"):
            assert output.dtype == torch.float32 and 0 <= output.min() and output.max() <= 1
            assert output.dim() == (4 if kind == "IMAGE" else 3)
    return outputs


def test_nodes_answer_describe_and_find(nodes: ModuleType, server: str):
    assert nodes.NODE_CLASS_MAPPINGS.keys() == nodes.NODE_DISPLAY_NAME_MAPPINGS.keys()
    question = "How many green crescents are there?"
    with KestrelClient(server, timeout=60) as client:
        answer = client.query(pixels(), question).answer
        caption = client.caption(pixels(), "short").caption
        boxes = client.detect(pixels(), "green crescent")
        points = client.point(pixels(), "green crescent")
        outline = client.segment(pixels(), "green crescent")
    asked: dict[str, Any] = {"question": question, "reasoning": False}
    (answers,) = called(nodes, "KestrelQuery", image=batch(2), **asked)
    assert answers == [answer, answer]
    (captions,) = called(nodes, "KestrelCaption", image=batch(), length="short", seed=7)
    assert captions == [caption]
    image = batch()
    drawn, (text,) = called(nodes, "KestrelDetect", image=image, objects="green crescent, unicorn")
    assert drawn.shape == image.shape and not torch.equal(drawn, image)
    height, width = image.shape[1:3]
    found = [each for each in json.loads(text) if each["object"] == "green crescent"]
    for each, box in zip(found, boxes, strict=True):
        left, top, right, bottom = each["bbox"]
        assert (left, right) == pytest.approx((box.x_min * width, box.x_max * width))
        assert (top, bottom) == pytest.approx((box.y_min * height, box.y_max * height))
        assert each["score"] == pytest.approx(box.score)
    _, (text,) = called(nodes, "KestrelPoint", image=image, objects="green crescent")
    assert [each["point"] for each in json.loads(text)] == [
        pytest.approx([point.x * width, point.y * height]) for point in points
    ]
    masks, drawn, (text, _) = called(
        nodes, "KestrelSegment", image=batch(2), objects="green crescent"
    )
    expected = torch.from_numpy(np.asarray(outline.to_mask()).astype(np.float32) / 255)
    assert torch.equal(masks, expected.expand(2, -1, -1)) and drawn.shape == batch(2).shape
    assert json.loads(text)[0]["object"] == "green crescent"


def test_nodes_take_any_tensor_and_refuse_bad_inputs(nodes: ModuleType):
    strange = torch.full((1, 64, 48, 4), float("nan"), dtype=torch.float16)
    strange[:, :32] = 7.0
    masks, _, (text,) = called(
        nodes, "KestrelSegment", image=strange, objects="unicorn", min_score=1.0
    )
    assert masks.shape == (1, 64, 48) and masks.max() == 0 and json.loads(text) == []
    for objects in ("", " , ", ",".join(map(str, range(33)))):
        with pytest.raises(ValueError, match="1 to 32 names"):
            called(nodes, "KestrelDetect", image=strange, objects=objects)
    with pytest.raises(InvalidArgumentError, match="question"):
        called(nodes, "KestrelQuery", image=strange, question="", reasoning=False)
