"""Embed: the embeddings of an image and of its crops, as types/embedding.py defines them. The registry does not list
it, because its results are arrays: RunSkill can't return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InvalidRequest
from ..types.embedding import Embedding, EmbeddingSpec
from ..types.events import FinishReason, StreamUpdate
from ..types.model_config import ModelConfig
from ..types.requests import Edges, PreparedImage, SamplingParams
from ..types.step import StepToken, TokenRule
from .base import SkillContext, SkillOutput, SkillRequest
from .settings import reject_unknown

EMBED = "embed"
"""The skill's name in the engine, in metrics and in logs."""

POOLINGS = ("mean", "none")
DTYPES = ("float32", "float16")
_DEFAULTS: dict[str, Any] = {
    "whole_image": True,
    "crops": False,
    "pooling": "mean",
    "dtype": "float32",
    "max_bytes": None,
    "one_by_one": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest(SkillRequest):
    """``max_bytes``: limit on the bytes of all embeddings together, or, if they are returned ``one_by_one``, of each.
    ``boxes``: the places of the crops in the image, once it is known."""

    spec: EmbeddingSpec
    max_bytes: int | None
    one_by_one: bool
    boxes: tuple[Edges, ...] = ()

    @property
    def reads(self) -> EmbeddingSpec:
        return self.spec

    @property
    def pixels_field(self) -> str:
        return "image"

    def about(
        self, images: tuple[PreparedImage, ...], model: ModelConfig
    ) -> tuple[EmbedRequest, tuple[PreparedImage, ...]]:
        """Raises InvalidRequest if the embeddings are larger than the caller takes."""
        (image,), spec, vision = images, self.spec, model.vision
        boxes = vision.crop_boxes(image.tiling)
        count = 1 if self.one_by_one else spec.image + spec.crops * len(boxes)
        vectors = vision.grid**2 if spec.patches else 1
        num_bytes = count * vectors * vision.proj_out_dim * (2 if spec.half else 4)
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            other = "" if self.one_by_one else ", leave out the crops, or use a stream"
            raise InvalidRequest(
                "pooling",
                f"{count} embeddings take {num_bytes} bytes, the limit is {self.max_bytes}: pool them, use "
                f"float16{other}",
                value=num_bytes,
                limit=self.max_bytes,
            )
        if spec.crops:
            # The runtime drops the features of other images. So this one does not share their embedding.
            image = replace(image, key=f"{image.key}/crops", keeps_features=True)
        return replace(self, boxes=tuple(boxes)), (image,)


class EmbedSkill:
    """Arguments: whole_image (default True), crops (default False), pooling ("mean", the default, or "none"), dtype
    ("float32", the default, or "float16"), max_bytes (limit on the bytes of all embeddings together; default: none),
    one_by_one (the limit is on each embedding instead; default False).

    Output: {"image", "crops", "boxes"}: the arrays of Embedding, and the place of each crop in the image.
    """

    name = EMBED

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> EmbedRequest:
        reject_unknown(arguments, _DEFAULTS.keys())
        reject_unknown(settings, frozenset())
        chosen = _DEFAULTS | {n: value for n, value in arguments.items() if value is not None}
        for name in ("whole_image", "crops"):
            if not isinstance(chosen[name], bool):
                raise InvalidRequest(name, f"{chosen[name]!r} is not true or false")
        for name, values in (("pooling", POOLINGS), ("dtype", DTYPES)):
            if chosen[name] not in values:
                raise InvalidRequest(name, f"{chosen[name]!r} is not one of {', '.join(values)}")
        if not (chosen["whole_image"] or chosen["crops"]):
            raise InvalidRequest("crops", "must be true if whole_image is false")
        return EmbedRequest(
            skill=self.name,
            prompt_suffix=(),
            sampling=SamplingParams(),
            max_tokens=1,
            max_bytes=chosen["max_bytes"],
            one_by_one=bool(chosen["one_by_one"]),
            spec=EmbeddingSpec(
                image=chosen["whole_image"],
                crops=chosen["crops"],
                patches=chosen["pooling"] == "none",
                half=chosen["dtype"] == "float16",
            ),
        )

    def new_control(
        self, request: EmbedRequest, max_tokens: int, context: SkillContext
    ) -> EmbedControl:
        return EmbedControl()

    def new_output(self, request: EmbedRequest, context: SkillContext) -> EmbedOutput:
        return EmbedOutput(request.boxes)


class EmbedControl:
    """Nothing is sampled, so the rule has no effect."""

    def rule(self, index: int) -> TokenRule:
        return _NO_RULE

    def accept(self, token: StepToken) -> FinishReason | None:
        raise AssertionError("no token is sampled for an embedding")


class EmbedOutput(SkillOutput):
    """Keeps the embedding until the request ends. ``boxes``: see `VisionConfig.crop_boxes`."""

    def __init__(self, boxes: tuple[Edges, ...]) -> None:
        self._boxes = boxes
        self._embedding: Embedding | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return ()

    def take(self, reading: object) -> None:
        assert isinstance(reading, Embedding)
        self._embedding = reading

    def push(self, token: StepToken) -> list[StreamUpdate]:
        raise AssertionError("no token is sampled for an embedding")

    def finish(self) -> list[StreamUpdate]:
        return []

    def output(self) -> dict[str, Any]:
        """Without arrays if the request was cancelled."""
        found = self._embedding or Embedding(None, None)
        return {"image": found.image, "crops": found.crops, "boxes": list(self._boxes)}


_NO_RULE = TokenRule()
