"""SkillCalls: the six skills and embeddings as typed methods. Owns no state; InferenceEngine supplies ``_call``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict, Unpack, overload

from ..types.events import EngineResult
from ..types.stream import EngineStream

Settings = Mapping[str, Any]
SpatialRefs = Sequence[Sequence[float]]


class _Options(TypedDict, total=False):
    settings: Settings | None
    request_id: str | None


class _Whole(_Options, total=False):
    stream: Literal[False]


class _Streamed(_Options, total=False):
    stream: Required[Literal[True]]


class _Question(TypedDict, total=False):
    reasoning: bool
    spatial_refs: SpatialRefs | None
    history: Sequence[tuple[str, str]]
    system: str
    presupposes: Sequence[str]


class _WholeQuestion(_Question, _Whole, total=False):
    pass


class _StreamedQuestion(_Question, _Streamed, total=False):
    pass


class _WholeAbout(_Whole, total=False):
    spatial_refs: SpatialRefs | None


class _StreamedAbout(_Streamed, total=False):
    spatial_refs: SpatialRefs | None


class SkillCalls:
    """Common arguments. ``image``: encoded bytes, a path, a pyvips.Image or a uint8 [H, W, C] array, or an InRegion,
    InCrops or Mirrored of one; for query, also a list of these; for point and detect, also a Tiled image. ``settings``:
    fields of SamplingParams and max_tokens; stop, logprobs, top_logprobs, constraint, repetition_penalty,
    presence_penalty, frequency_penalty and logit_bias for query and caption; max_reasoning_tokens and max_absence for
    query; max_objects for point and detect; min_score for point, detect and segment; max_overlap for detect; absent or
    None means the default. ``stream``: False returns the EngineResult, True an EngineStream once the request is queued.
    ``request_id``: the caller's name for the request, at most 128 printable characters.

    All raise RequestError (naming the field), EngineOverloaded and EngineClosed; results also RuntimeFailure.
    """

    @overload
    async def query(
        self, image: Any = ..., question: str | None = ..., **options: Unpack[_WholeQuestion]
    ) -> EngineResult: ...

    @overload
    async def query(
        self, image: Any = ..., question: str | None = ..., **options: Unpack[_StreamedQuestion]
    ) -> EngineStream: ...

    async def query(
        self,
        image: Any = None,
        question: str | None = None,
        *,
        reasoning: bool = False,
        spatial_refs: SpatialRefs | None = None,
        history: Sequence[tuple[str, str]] = (),
        system: str = "",
        presupposes: Sequence[str] = (),
        **options: Any,
    ) -> EngineResult | EngineStream:
        """Answers ``question``, about ``image`` if there is one. Output: {"answer", "reasoning"?}.

        ``reasoning``: think aloud first, with points that ground the text. ``spatial_refs``: points [x, y] or boxes
        [x_min, y_min, x_max, y_max], normalised, that the question refers to; they need an image. ``history``: earlier
        questions with their answers, oldest first. ``system``: instructions before the first question. ``presupposes``:
        objects without which there is no answer; result.absences says how likely each is absent, and result.abstained
        whether one was, with a probability above max_absence.
        """
        arguments = {
            "question": question,
            "reasoning": reasoning,
            "spatial_refs": spatial_refs,
            "history": history,
            "system": system,
            "presupposes": presupposes,
        }
        return await self._call("query", image, arguments, **options)

    @overload
    async def caption(
        self, image: Any, length: str = ..., **options: Unpack[_Whole]
    ) -> EngineResult: ...

    @overload
    async def caption(
        self, image: Any, length: str = ..., **options: Unpack[_Streamed]
    ) -> EngineStream: ...

    async def caption(
        self, image: Any, length: str = "normal", **options: Any
    ) -> EngineResult | EngineStream:
        """Describes ``image``; ``length`` is "short", "normal" or "long". Output: {"caption"}."""
        return await self._call("caption", image, {"length": length}, **options)

    @overload
    async def point(
        self, image: Any, object: str, **options: Unpack[_WholeAbout]
    ) -> EngineResult: ...

    @overload
    async def point(
        self, image: Any, object: str, **options: Unpack[_StreamedAbout]
    ) -> EngineStream: ...

    async def point(
        self, image: Any, object: str, *, spatial_refs: SpatialRefs | None = None, **options: Any
    ) -> EngineResult | EngineStream:
        """Points at every ``object``. Output: {"points": [{"x", "y", "score"}]}, normalised."""
        arguments = {"object": object, "spatial_refs": spatial_refs}
        return await self._call("point", image, arguments, **options)

    @overload
    async def detect(self, image: Any, object: str, **options: Unpack[_Whole]) -> EngineResult: ...

    @overload
    async def detect(
        self, image: Any, object: str, **options: Unpack[_Streamed]
    ) -> EngineStream: ...

    async def detect(self, image: Any, object: str, **options: Any) -> EngineResult | EngineStream:
        """Boxes every ``object``, perhaps beyond the image. Output: {"objects": [{"x_min", "y_min", "x_max", "y_max",
        "score"}]}, normalised."""
        return await self._call("detect", image, {"object": object}, **options)

    @overload
    async def segment(
        self, image: Any, object: str, **options: Unpack[_WholeAbout]
    ) -> EngineResult: ...

    @overload
    async def segment(
        self, image: Any, object: str, **options: Unpack[_StreamedAbout]
    ) -> EngineStream: ...

    async def segment(
        self, image: Any, object: str, *, spatial_refs: SpatialRefs | None = None, **options: Any
    ) -> EngineResult | EngineStream:
        """Outlines one ``object``. Output: {"segments": [{"svg_path", "score"?, "bbox"?, …}]}; the path is relative to
        the box. Raises SkillUnavailable on a model that can't segment (Moondream 2)."""
        arguments = {"object": object, "spatial_refs": spatial_refs}
        return await self._call("segment", image, arguments, **options)

    @overload
    async def gaze(
        self, image: Any, eye: Sequence[float], **options: Unpack[_Whole]
    ) -> EngineResult: ...

    @overload
    async def gaze(
        self, image: Any, eye: Sequence[float], **options: Unpack[_Streamed]
    ) -> EngineStream: ...

    async def gaze(
        self, image: Any, eye: Sequence[float], **options: Any
    ) -> EngineResult | EngineStream:
        """Finds what a person looks at. ``eye``: the place [x, y] of an eye or a face. Output: {"gaze": {"x", "y",
        "score"}}, normalised, or {"gaze": None} if it is outside the image: result.absence is the probability of that.
        """
        return await self._call("gaze", image, {"eye": eye}, **options)

    async def embed(
        self,
        image: Any,
        *,
        whole_image: bool = True,
        crops: bool = False,
        pooling: Literal["mean", "none"] = "mean",
        dtype: Literal["float32", "float16"] = "float32",
        request_id: str | None = None,
    ) -> EngineResult:
        """Returns the embeddings of ``image`` and of its crops (see types/embedding.py).

        ``whole_image``, ``crops``: which ones. ``pooling``: "mean" gives one vector of Euclidean length 1 each, "none"
        one vector for each of P patches. Output: {"image": array [dim] or [P, dim], or None, "crops": array [n, dim] or
        [n, P, dim], or None, "boxes": the place of each crop as (x_min, y_min, x_max, y_max), normalised}. The first
        crop is the whole image, the others are its tiles row by row; an image of a single tile has one crop.
        """
        arguments = {"whole_image": whole_image, "crops": crops, "pooling": pooling, "dtype": dtype}
        result = await self._call("embed", image, arguments, request_id=request_id)
        assert isinstance(result, EngineResult)
        return result

    async def _call(
        self,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any],
        *,
        settings: Settings | None = None,
        stream: bool = False,
        request_id: str | None = None,
    ) -> EngineResult | EngineStream:
        raise AssertionError("supplied by InferenceEngine")
