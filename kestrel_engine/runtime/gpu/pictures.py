"""EncodedPictures: crops in, and each picture's image prefix kept on the device until it is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...models.vision import num_distinct
from ...step import EncodeSlice
from .staging import CropUploader
from .vision import FusedVision
from .vision_graphs import VisionGraphs


class EncodedPictures:
    """Owns embeddings, and features of pictures whose crops are not all there yet. ``bos`` [dim]: the embedding that
    stands before a picture."""

    def __init__(self, vision: FusedVision, graphs: VisionGraphs | None, bos: Tensor) -> None:
        self._vision, self._bos = vision, bos
        self.encode_crops = (vision if graphs is None else graphs).encode_crops
        """The tower's passes as steps run them: captured where there are graphs."""
        self._upload = CropUploader(bos.device)
        self._features: dict[str, list[Tensor]] = {}
        self._prefixes: dict[str, Tensor] = {}

    def drop(self, keys: Iterable[str]) -> None:
        """A key may be unknown."""
        for key in keys:
            self._features.pop(key, None)
            self._prefixes.pop(key, None)

    def clear(self) -> None:
        self._features.clear()
        self._prefixes.clear()

    def prefix(self, key: str) -> Tensor:
        """[image prefix, dim]: BOS and the picture."""
        assert key in self._prefixes, f"picture {key} was not encoded: {sorted(self._prefixes)}"
        return self._prefixes[key]

    def encode(self, pieces: Sequence[EncodeSlice]) -> None:
        """All crops of a step together; a picture's prefix is made once its last crop is there."""
        wanted = []
        for piece in pieces:
            distinct = num_distinct(piece.image.num_crops, piece.image.tiling)
            wanted.append(piece.image.crops[piece.first : min(piece.last, distinct)])
        if not wanted:
            return
        features = None
        if sum(map(len, wanted)):
            features = self.encode_crops(self._upload(wanted))
        begin = 0
        complete: list[tuple[str, Tensor, tuple[int, int]]] = []
        for piece, own in zip(pieces, wanted, strict=True):
            key = piece.image.key
            if piece.first == 0:
                self._features[key] = []
            if features is not None and len(own):
                self._features[key].append(features[begin : begin + len(own)])
                begin += len(own)
            if piece.last == piece.image.num_crops:
                parts = self._features.pop(key)
                whole = parts[0] if len(parts) == 1 else torch.cat(parts)
                complete.append((key, whole, piece.image.tiling))
        if not complete:
            return
        embedded = self._vision.embed_many([(whole, tiling) for _, whole, tiling in complete])
        for (key, _, _), embedding in zip(complete, embedded, strict=True):
            self._prefixes[key] = torch.cat([self._bos[None], embedding])
