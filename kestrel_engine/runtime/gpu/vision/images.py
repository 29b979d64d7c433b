"""EncodedImages: encodes crops, and stores each image's prefix on the device until it is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ....models.vision import num_distinct
from ....types.step import EmbedRead, EncodeSlice
from ...embedding import FetchedEmbedding, fetch
from ..state.staging import ImageUploader, Uploader
from .device_crops import DeviceCrops
from .graphs import VisionGraphs
from .tower import FusedVision


class EncodedImages:
    """Owns the prefixes of images, and the features of images with crops that are not encoded yet, or that keep them.
    ``bos``: [dim], the embedding of BOS, which precedes an image."""

    def __init__(
        self, vision: FusedVision, graphs: VisionGraphs | None, bos: Tensor, upload: Uploader
    ) -> None:
        self._vision, self._bos = vision, bos
        self.encode_crops = (vision if graphs is None else graphs).encode_crops
        """Runs the tower's passes as steps do, with graphs if there are any."""
        self._upload = ImageUploader(bos.device)
        self._make_crops = DeviceCrops(vision.config, upload, self._upload, bos.device)
        self._crops: dict[str, Tensor] = {}
        """The crops of images that arrived as pixels, until the last crop is encoded."""
        self._features: dict[str, list[Tensor]] = {}
        self._prefixes: dict[str, Tensor] = {}

    def drop(self, keys: Iterable[str]) -> None:
        """Drops images. An unknown key has no effect."""
        for key in keys:
            self._crops.pop(key, None)
            self._features.pop(key, None)
            self._prefixes.pop(key, None)

    def clear(self) -> None:
        self._crops.clear()
        self._features.clear()
        self._prefixes.clear()

    def prefix(self, key: str) -> Tensor:
        """Returns the embeddings of BOS and the image: [image prefix, dim]."""
        assert key in self._prefixes, f"image {key} was not encoded: {sorted(self._prefixes)}"
        return self._prefixes[key]

    def encode(self, pieces: Sequence[EncodeSlice]) -> None:
        """Encodes all crops of a step together. Makes an image's prefix after its last crop."""
        if not pieces:
            return
        crops = self._crops_of(pieces)
        features = None
        if sum(map(len, crops)):
            features = self.encode_crops(crops[0] if len(crops) == 1 else torch.cat(crops))
        begin = 0
        complete: list[tuple[str, Tensor, tuple[int, int]]] = []
        for piece, own in zip(pieces, crops, strict=True):
            key = piece.image.key
            if piece.first == 0:
                self._features[key] = []
            if features is not None and len(own):
                self._features[key].append(features[begin : begin + len(own)])
                begin += len(own)
            if piece.last == piece.image.num_crops:
                self._crops.pop(key, None)
                parts = self._features.pop(key)
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                if piece.image.keeps_features:
                    self._features[key] = [joined]
                complete.append((key, joined, piece.image.tiling))
        if not complete:
            return
        embedded = self._vision.embed_many([(joined, tiling) for _, joined, tiling in complete])
        for (key, _, _), embedding in zip(complete, embedded, strict=True):
            self._prefixes[key] = torch.cat([self._bos[None], embedding])

    def embedding(self, read: EmbedRead) -> FetchedEmbedding:
        """Enqueues the copies of embeddings. The image was encoded."""
        key, spec, crops = read.image.key, read.spec, None
        if spec.crops:
            (features,) = self._features[key]
            crops = torch.stack(self._vision.embed_many([(f[None], (1, 1)) for f in features]))
        return fetch(spec, self.prefix(key)[1:] if spec.image else None, crops)

    def warm_up(self) -> None:
        """Compiles the kernels that make crops."""
        self._make_crops.warm_up()

    def _crops_of(self, pieces: Sequence[EncodeSlice]) -> list[Tensor]:
        """Returns each piece's crops [n, S, S, 3] uint8 on the device; n may be 0."""
        begun = [each.image for each in pieces if each.first == 0 and each.image.pixels is not None]
        for image, crops in zip(begun, self._make_crops(begun), strict=True):
            self._crops[image.key] = crops
        found = []
        for piece in pieces:
            image = piece.image
            last = min(piece.last, num_distinct(image.num_crops, image.tiling))
            if image.pixels is not None:
                found.append(self._crops[image.key][piece.first : last])
            else:
                assert image.crops is not None, image
                own = image.crops[piece.first : last]
                target = torch.empty(own.shape, dtype=torch.uint8, device=self._bos.device)
                if len(own):
                    self._upload(own, target)
                found.append(target)
        return found
