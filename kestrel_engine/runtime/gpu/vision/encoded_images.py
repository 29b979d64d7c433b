"""EncodedImages: encodes crops, and stores each image's prefix on the device until it is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ....types.adapter import Adapter
from ....types.requests import PreparedImage
from ....types.step import EncodeSlice, ImageRead
from ...kept_crops import KeptCrops
from ...reading import PendingReading, fetch
from ..state.staging import ImageUploader, Uploader
from .crop_graphs import captured_crops
from .device_crops import DeviceCrops
from .graphs import VisionGraphs
from .tower import FusedVision


class EncodedImages:
    """Owns the prefixes of images, the features of images with crops that are not encoded yet, or that keep them, and
    the features of crops that later images may reuse. ``bos``: [dim], the embedding of BOS, which precedes an image."""

    def __init__(
        self, vision: FusedVision, graphs: VisionGraphs | None, bos: Tensor, upload: Uploader
    ) -> None:
        self._vision, self._bos = vision, bos
        self.encode_crops = (vision if graphs is None else graphs).encode_crops
        """Runs the tower's passes as steps do, with graphs if there are any."""
        self._upload = ImageUploader(bos.device)
        self._make_crops = DeviceCrops(
            vision.config,
            upload,
            self._upload,
            bos.device,
            graphs=None if graphs is None else captured_crops(vision.config, bos.device),
        )
        self._crops: dict[str, Tensor] = {}
        """The crops of images that arrived as pixels, until the last crop is encoded."""
        self._features: dict[str, list[Tensor]] = {}
        self._kept = KeptCrops()
        self._prefixes: dict[str, Tensor] = {}

    def drop(self, keys: Iterable[str], crop_keys: Iterable[str] = ()) -> None:
        """Drops images and kept crops. An unknown key has no effect."""
        self._kept.drop(crop_keys)
        for key in keys:
            self._crops.pop(key, None)
            self._features.pop(key, None)
            self._prefixes.pop(key, None)

    def clear(self) -> None:
        self._make_crops.clear()
        self._crops.clear()
        self._kept.clear()
        self._features.clear()
        self._prefixes.clear()

    def prefix(self, key: str) -> Tensor:
        """Returns the embeddings of BOS and the image: [image prefix, dim]."""
        assert key in self._prefixes, f"image {key} was not encoded"
        return self._prefixes[key]

    def encode(self, pieces: Sequence[EncodeSlice], *, leave_room: bool = False) -> None:
        """Encodes all crops of a step. Makes an image's prefix after its last crop. ``leave_room``: as in StepPlan."""
        for piece in pieces:
            if piece.image.features is not None:
                self._prefixes[piece.image.key] = self._of_features(piece.image.features)
        pieces = [piece for piece in pieces if piece.image.features is None]
        if not pieces:
            return
        crops = self._crops_of(pieces)
        features = None
        if sum(map(len, crops)):
            together = crops[0] if len(crops) == 1 else torch.cat(crops)
            features = self.encode_crops(together, _of_crops(pieces), leave_room=leave_room)
        begin = 0
        complete: list[tuple[PreparedImage, Tensor]] = []
        for piece in pieces:
            key = piece.image.key
            if piece.first == 0:
                self._features[key] = []
            own = None if features is None else features[begin : begin + piece.num_encoded]
            begin += piece.num_encoded
            self._features[key] += self._kept.features(piece, own)
            if piece.last == piece.image.num_crops:
                self._crops.pop(key, None)
                parts = self._features.pop(key)
                joined = parts[0] if len(parts) == 1 else torch.cat(parts)
                if piece.image.keeps_features:
                    self._features[key] = [joined]
                complete.append((piece.image, joined))
        if not complete:
            return
        embedded = self._vision.embed_many(
            [(joined, image.tiling) for image, joined in complete],
            [image.adapter for image, _ in complete],
        )
        for (image, _), embedding in zip(complete, embedded, strict=True):
            self._prefixes[image.key] = torch.cat([self._bos[None], embedding])
        # The device works on the images.
        self._make_crops.capture()

    def _of_features(self, features: np.ndarray) -> Tensor:
        """The prefix of an image whose embedding the caller sent."""
        dtype = torch.float16 if features.dtype.itemsize == 2 else torch.float32
        sent = torch.empty(features.shape, dtype=dtype, device=self._bos.device)
        self._upload(features.view(np.uint8), sent.view(torch.uint8))
        return torch.cat([self._bos[None], sent.to(self._bos.dtype)])

    def reading(self, read: ImageRead) -> PendingReading:
        """Enqueues the copies. The image was encoded."""
        key, spec, crops = read.image.key, read.spec, None
        if spec.crops:
            (features,) = self._features[key]
            each = [(feature[None], (1, 1)) for feature in features]
            adapters = [read.image.adapter] * len(each)
            crops = torch.stack(self._vision.embed_many(each, adapters))
        return fetch(spec, self.prefix(key)[1:] if spec.image else None, crops)

    def warm_up(self) -> None:
        """Compiles the kernels that make crops, and those of adapters of the projector."""
        self._make_crops.warm_up()
        self._vision.warm_up_projector()

    def _crops_of(self, pieces: Sequence[EncodeSlice]) -> list[Tensor]:
        """Returns the crops [n, S, S, 3] uint8 of each piece that are encoded, on the device; n may be 0."""
        begun = [each.image for each in pieces if each.first == 0 and each.image.pixels is not None]
        for image, crops in zip(begun, self._make_crops(begun), strict=True):
            self._crops[image.key] = crops
        found = []
        for piece in pieces:
            image = piece.image
            if image.pixels is not None:
                all_crops = self._crops[image.key]
                runs = [all_crops[first:last] for first, last in piece.encoded_runs]
                found.append(runs[0] if len(runs) == 1 else torch.cat([all_crops[:0], *runs]))
            else:
                assert image.crops is not None, image
                own = image.crops[piece.distinct.start : piece.distinct.stop]
                if piece.reused:
                    own = image.crops[[i for i in piece.distinct if i not in piece.reused]]
                target = torch.empty(own.shape, dtype=torch.uint8, device=self._bos.device)
                if len(own):
                    self._upload(own, target)
                found.append(target)
        return found


def _of_crops(pieces: Sequence[EncodeSlice]) -> list[Adapter | None]:
    """Returns the adapters of the crops that pass through the tower; empty if there are none."""
    if all(piece.image.adapter is None for piece in pieces):
        return []
    return [piece.image.adapter for piece in pieces for _ in range(piece.num_encoded)]
