"""Kestrel's skills as nodes of ComfyUI. docs/use/tools.md shows their use.

ComfyUI imports this folder from ``custom_nodes``. A workflow may come from anyone, so it can't name the server:
otherwise it could send the token and the images elsewhere. The variables KESTREL_SERVER and KESTREL_TOKEN belong to the
operator.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import PIL.Image
import torch

from kestrel_client import Box, KestrelClient

_IN_FLIGHT = 8
"""Images of a batch that are asked about at the same time."""
_MOST_OBJECTS = 32
_CATEGORY = "kestrel"
Inputs = dict[str, dict[str, tuple[Any, ...]]]


@cache
def _client() -> KestrelClient:
    return KestrelClient(
        os.environ.get("KESTREL_SERVER", "127.0.0.1:50051"),
        token=os.environ.get("KESTREL_TOKEN") or os.environ.get("KESTREL_API_KEY"),
    )


def _each(images: torch.Tensor, ask: Callable[[np.ndarray], Any]) -> list[Any]:
    """What ``ask`` returns for the pixels of each image. ``images``: float [batch, height, width, channels], 0 to 1."""
    levels = torch.nan_to_num(images.detach().float()).clamp(0, 1).mul(255).round()
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        return list(pool.map(ask, levels.to(torch.uint8).cpu().numpy()))


def _batch(images: list[PIL.Image.Image]) -> torch.Tensor:
    """As ComfyUI has images, or masks if they have one channel."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).float() / 255


def _names(objects: str) -> list[str]:
    """Raises ValueError."""
    names = list(dict.fromkeys(name.strip() for name in objects.split(",") if name.strip()))
    if not 1 <= len(names) <= _MOST_OBJECTS:
        raise ValueError(
            f"objects: must be 1 to {_MOST_OBJECTS} names, separated by commas, not {len(names)}"
        )
    return names


def _text(default: str, multiline: bool = False) -> tuple[str, dict[str, Any]]:
    return "STRING", {"default": default, "multiline": multiline}


_TEXT_INPUTS = {
    "temperature": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 100.0, "step": 0.1}),
    "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1}),
}
_SCORE = ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.05})


class Query:
    CATEGORY, FUNCTION = _CATEGORY, "answers"
    DESCRIPTION = "Answers a question about each image."
    RETURN_TYPES, RETURN_NAMES, OUTPUT_IS_LIST = ("STRING",), ("answer",), (True,)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        question = _text("What is in this image?", multiline=True)
        reasoning = ("BOOLEAN", {"default": False})
        return {
            "required": {"image": ("IMAGE",), "question": question, "reasoning": reasoning},
            "optional": _TEXT_INPUTS,
        }

    def answers(self, image: torch.Tensor, **inputs: Any) -> tuple[list[str]]:
        options = {"temperature": 0.0, "seed": 0, **inputs}
        return (_each(image, lambda pixels: _client().query(pixels, **options).answer),)


class Caption:
    CATEGORY, FUNCTION = _CATEGORY, "captions"
    DESCRIPTION = "Describes each image."
    RETURN_TYPES, RETURN_NAMES, OUTPUT_IS_LIST = ("STRING",), ("caption",), (True,)

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        lengths = (["short", "normal", "long"], {"default": "normal"})
        return {"required": {"image": ("IMAGE",), "length": lengths}, "optional": _TEXT_INPUTS}

    def captions(self, image: torch.Tensor, **inputs: Any) -> tuple[list[str]]:
        options = {"temperature": 0.0, "seed": 0, **inputs}
        return (_each(image, lambda pixels: _client().caption(pixels, **options).caption),)


class _Finds:
    """A node that looks for objects: the images with what was found drawn on them, and JSON for each image."""

    CATEGORY, FUNCTION = _CATEGORY, "found"
    RETURN_TYPES: tuple[str, ...] = ("IMAGE", "STRING")
    RETURN_NAMES: tuple[str, ...] = ("drawn", "json")
    OUTPUT_IS_LIST: tuple[bool, ...] = (False, True)
    skill = "detect"

    @classmethod
    def INPUT_TYPES(cls) -> Inputs:
        return {
            "required": {"image": ("IMAGE",), "objects": _text("person")},
            "optional": {"min_score": _SCORE},
        }

    def found(self, image: torch.Tensor, objects: str, min_score: float = 0.0) -> tuple[Any, ...]:
        results = self._results(image, objects, min_score)
        return _batch([result.draw() for result in results]), [_listed(each) for each in results]

    def _results(self, image: torch.Tensor, objects: str, min_score: float) -> list[Any]:
        names = _names(objects)

        def ask(pixels: np.ndarray) -> Any:
            result = getattr(_client(), self.skill)(pixels, names, min_score=min_score or None)
            for error in result.errors.values():
                raise error
            return result

        return _each(image, ask)


class Detect(_Finds):
    DESCRIPTION = "Boxes of objects. Separate their names by commas. JSON has pixels."


class Point(_Finds):
    DESCRIPTION = "Points at objects. Separate their names by commas. JSON has pixels."
    skill = "point"


class Segment(_Finds):
    DESCRIPTION = "A mask of the outlined objects, one of each name. Separate the names by commas."
    RETURN_TYPES = ("MASK", "IMAGE", "STRING")
    RETURN_NAMES = ("mask", "drawn", "json")
    OUTPUT_IS_LIST = (False, False, True)
    skill = "segment"

    def found(self, image: torch.Tensor, objects: str, min_score: float = 0.0) -> tuple[Any, ...]:
        results = self._results(image, objects, min_score)
        masks = _batch([result.to_mask() for result in results])
        drawn = _batch([result.draw() for result in results])
        return masks, drawn, [_listed(each) for each in results]


def _listed(result: Any) -> str:
    """JSON: a list of an object for each box, point or outline."""
    width, height = result.image_size
    found = []
    for each in result:
        place = getattr(each, "box", each)
        if isinstance(place, Box):
            corners = (place.x_min * width, place.y_min * height)
            at = {"bbox": [*corners, place.x_max * width, place.y_max * height]}
        else:
            at = {"point": [place.x * width, place.y * height]}
        found.append({"object": each.label, **at, "score": each.score})
    return json.dumps(found, ensure_ascii=False)


NODE_CLASS_MAPPINGS = {
    f"Kestrel{node.__name__}": node for node in (Query, Caption, Detect, Point, Segment)
}
NODE_DISPLAY_NAME_MAPPINGS = {
    name: f"Kestrel: {node.__name__.lower()}" for name, node in NODE_CLASS_MAPPINGS.items()
}
