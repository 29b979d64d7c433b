"""Embed: the embeddings of an image and of its crops, as types/embedding.py defines them. The registry does not list
it, because its results are arrays: RunSkill can't return them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequest
from ..types.embedding import Embedding, EmbeddingSpec
from ..types.events import FinishReason, StreamUpdate
from ..types.requests import SamplingParams
from ..types.step import StepToken, TokenRule
from .base import SkillContext, SkillRequest
from .settings import reject_unknown

EMBED = "embed"
"""The skill's name in the engine, in metrics and in logs."""

POOLINGS = ("mean", "none")
DTYPES = ("float32", "float16")
_ARGUMENTS = frozenset({"whole_image", "crops", "pooling", "dtype", "max_bytes", "one_by_one"})


class EmbedSkill:
    """Arguments: whole_image (default True), crops (default False), pooling ("mean", the default, or "none"), dtype
    ("float32", the default, or "float16"), max_bytes (limit on the bytes of all embeddings together; default: none),
    one_by_one (the limit is on each embedding instead; default False).

    Output: {"image", "crops", "boxes"}: the arrays of Embedding, and the place of each crop in the image.
    """

    name = EMBED

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SkillRequest:
        reject_unknown(arguments, _ARGUMENTS)
        reject_unknown(settings, frozenset())
        given = {"whole_image": True, "crops": False, "pooling": "mean", "dtype": "float32"}
        given |= {name: value for name, value in arguments.items() if value is not None}
        for name in ("whole_image", "crops"):
            if not isinstance(given[name], bool):
                raise InvalidRequest(name, f"{given[name]!r} is not true or false")
        for name, values in (("pooling", POOLINGS), ("dtype", DTYPES)):
            if given[name] not in values:
                raise InvalidRequest(name, f"{given[name]!r} is not one of {', '.join(values)}")
        if not (given["whole_image"] or given["crops"]):
            raise InvalidRequest("crops", "must be true if whole_image is false")
        return SkillRequest(
            skill=self.name,
            prompt_suffix=(),
            sampling=SamplingParams(),
            max_tokens=1,
            options={
                "max_bytes": given.get("max_bytes"),
                "one_by_one": given.get("one_by_one", False),
            },
            embedding=EmbeddingSpec(
                image=bool(given["whole_image"]),
                crops=bool(given["crops"]),
                patches=given["pooling"] == "none",
                half=given["dtype"] == "float16",
            ),
        )

    def new_control(
        self, request: SkillRequest, max_tokens: int, context: SkillContext
    ) -> EmbedControl:
        return EmbedControl()

    def new_output(self, request: SkillRequest, context: SkillContext) -> EmbedOutput:
        return EmbedOutput(request.options["boxes"])


class EmbedControl:
    """Nothing is sampled, so the rule has no effect."""

    def rule(self, index: int) -> TokenRule:
        return _NO_RULE

    def accept(self, token: StepToken) -> FinishReason | None:
        raise AssertionError("no token is sampled for an embedding")


class EmbedOutput:
    """Keeps the embedding until the request ends. ``boxes``: see `crop_boxes`."""

    def __init__(self, boxes: list[tuple[float, float, float, float]]) -> None:
        self._boxes = boxes
        self._embedding: Embedding | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return ()

    def take(self, embedding: Embedding) -> None:
        self._embedding = embedding

    def push(self, token: StepToken) -> list[StreamUpdate]:
        raise AssertionError("no token is sampled for an embedding")

    def finish(self) -> list[StreamUpdate]:
        return []

    def output(self) -> dict[str, Any]:
        """Without arrays if the request was cancelled."""
        found = self._embedding or Embedding(None, None)
        return {"image": found.image, "crops": found.crops, "boxes": self._boxes}


_NO_RULE = TokenRule()
