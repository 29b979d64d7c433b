"""Embeddings of images and crops. Their arrays need numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..errors import InvalidImageError
from ..geometry import Box, ImageSize, from_box
from ..images.features import ImageFeatures
from .plain import plain_fields, plain_value
from .reading import read, words_by_value
from .results.base import Timings, Usage, info_fields
from .results.exports import package

if TYPE_CHECKING:
    import numpy

Pooling: TypeAlias = Literal["mean", "none"]
EmbeddingDtype: TypeAlias = Literal["float32", "float16"]

_DTYPES: dict[int, EmbeddingDtype] = words_by_value(pb.EmbeddingDtype)


@dataclass(frozen=True, slots=True, repr=False)
class Embedding:
    """The embedding of an image or of a crop. ``numpy.asarray(embedding)`` is the same as ``embedding.array``."""

    data: bytes
    """The numbers, little endian, row by row."""
    rows: int
    """1 if the vectors of the patches are pooled, else the number of patches."""
    dimensions: int
    """Numbers of a row."""
    dtype: EmbeddingDtype
    box: Box
    """The part of the image that the embedding is about."""
    crop: int | None = None
    """Number of the crop, 0 for the overview; None for the whole image."""

    def __repr__(self) -> str:
        return f"Embedding({self.rows} x {self.dimensions} {self.dtype}, {self.box})"

    @property
    def array(self) -> numpy.ndarray[Any, Any]:
        """A read-only array: [dimensions] if the vectors of the patches are pooled, otherwise [rows, dimensions].

        Raises MissingDependencyError without numpy.
        """
        np = package("numpy")
        numbers = np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<"))
        found: numpy.ndarray[Any, Any] = (
            numbers if self.rows == 1 else numbers.reshape(self.rows, self.dimensions)
        )
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        array = self.array
        if copy is False and dtype not in (None, array.dtype):
            raise ValueError("the embedding has another dtype, so it must be copied")
        return array.astype(dtype or array.dtype, copy=bool(copy))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EmbedResult:
    """The embeddings of an image. Those of different models cannot be compared."""

    embeddings: tuple[Embedding, ...]
    """That of the whole image, then those of the crops; only what was requested."""
    usage: Usage
    timings: Timings
    model: str
    """Name of the model that computed the embeddings."""
    request_id: str
    image_size: ImageSize
    """Width and height of the upright image in pixels."""
    image_id: str = ""
    """The id of the stored image, for ImageHandle; empty if the server does not store it."""
    adapter: str = ""
    """The adapter that the call named; empty without one."""
    num_crops: int = 0
    """Crops in which the model saw the image (``max_crops``)."""

    @property
    def whole_image(self) -> Embedding:
        """The embedding of the whole image. Raises LookupError if it was not requested."""
        for each in self.embeddings:
            if each.crop is None:
                return each
        raise LookupError("the embedding of the whole image was not requested")

    @property
    def features(self) -> ImageFeatures:
        """What calls take in place of the image: of the whole image, with ``pooling="none"``. They take the result,
        too. Raises InvalidImageError for other embeddings."""
        whole = next((each for each in self.embeddings if each.crop is None), None)
        if whole is None or whole.rows == 1:
            raise InvalidImageError(
                "the embedding does not stand for an image: embed the whole image with pooling='none'"
            )
        return ImageFeatures(
            whole.data, whole.rows, whole.dimensions, self.image_size, self.adapter
        )

    @property
    def crops(self) -> tuple[Embedding, ...]:
        """The overview first, then the tiles row by row; empty if they were not requested."""
        return tuple(each for each in self.embeddings if each.crop is not None)

    def __repr__(self) -> str:
        return f"EmbedResult({len(self.embeddings)} x {self.embeddings[0]}, {self.model})"

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``json.dumps``, with the numbers of each embedding as a list. Needs numpy."""
        whole = next((_plain(each) for each in self.embeddings if each.crop is None), None)
        crops = [_plain(crop) for crop in self.crops]
        return {"whole_image": whole, "crops": crops, **plain_fields(self, "embeddings")}


def _plain(embedding: Embedding) -> dict[str, Any]:
    return {"box": plain_value(embedding.box), "vector": embedding.array.tolist()}


def read_embedding(message: pb.Embedding) -> Embedding:
    """Raises ValueError for a format that this version does not know."""
    if message.dtype not in _DTYPES:
        raise ValueError(f"the server sent an embedding of the unknown dtype {message.dtype}")
    return read(
        Embedding,
        message,
        dtype=_DTYPES[message.dtype],
        box=from_box(message.box),
        crop=message.crop if message.HasField("crop") else None,
    )


def embed_result(response: pb.EmbedResponse, adapter: str) -> EmbedResult:
    """The result of a unary call."""
    return EmbedResult(
        embeddings=tuple(map(read_embedding, response.embeddings)),
        usage=read(Usage, response.usage),
        timings=read(Timings, response.timings),
        adapter=adapter,
        **info_fields(response.info),
    )


class EmbedStream:
    """Reads the messages of a stream. Its result has the embeddings of all messages."""

    def __init__(self, adapter: str) -> None:
        self._adapter = adapter
        self._received = pb.EmbedResponse()

    def event(self, message: Any, payload: object) -> Embedding | None:
        if not isinstance(payload, pb.Embedding):
            return None
        self._received.embeddings.append(payload)
        return read_embedding(payload)

    def result(self, final: pb.EmbedResponse) -> EmbedResult:
        self._received.MergeFrom(final)
        return embed_result(self._received, self._adapter)
