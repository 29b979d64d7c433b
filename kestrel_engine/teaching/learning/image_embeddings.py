"""The embeddings of images. What no adapter changes is computed once and kept, within a limit on memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ...config.image_limits import ImageLimits
from ...errors import ConfigError, RequestError
from ...models.low_rank import Adapters
from ...models.moondream import Moondream
from ...models.vision import num_distinct
from ...preprocess.crops import cut_crops
from ...preprocess.decoding.open_image import open_image
from ..data.views import View

Changed: TypeAlias = Literal["nothing", "projector", "tower"]
NOTHING: Changed = "nothing"
PROJECTOR: Changed = "projector"
TOWER: Changed = "tower"
Kept: TypeAlias = tuple[Tensor, tuple[int, int]]
"""What is computed of an image's crops, [crops, patches, enc_dim] or the embedding, and the tiling."""


class ImageEmbeddings:
    """Keeps what is computed of images in the host's memory, the first ones up to ``most_bytes``. Others are computed
    again each time: in a pass over all images in random order, no other choice would be found more often. Views are
    computed each time too, because no view comes twice.

    ``changed``: the first part that the adapter changes. What it reads is kept: for NOTHING the embeddings, for
    PROJECTOR the features, for TOWER the embedded patches."""

    def __init__(
        self,
        model: Moondream,
        limits: ImageLimits,
        most_bytes: int,
        *,
        changed: Changed = NOTHING,
    ) -> None:
        self._model, self._limits, self._room = model, limits, most_bytes
        self._changed = changed
        self._kept: dict[Path, Kept] = {}

    def of(
        self,
        paths: Sequence[Path],
        adapters: Adapters | None = None,
        views: Sequence[View | None] | None = None,
    ) -> Tensor:
        """Returns [len(paths), image positions, dim] on the model's device. ``views``: of each image; None shows it as
        it is. Raises ConfigError, which names the file that is no image."""
        found = [
            self._of(path) if view is None else self._computed(path, view)
            for path, view in zip(paths, views or [None] * len(paths), strict=True)
        ]
        on_device = [kept.to(self._model.device) for kept, _ in found]
        if self._changed == NOTHING:
            return torch.stack(on_device)
        vision = self._model.vision
        if self._changed == TOWER:
            x = torch.cat(on_device)
            for block in vision.blocks:
                x = block(x, adapters)
            crops = [len(kept) for kept in on_device]
            on_device = list(torch.split(vision.post_ln(x), crops))
        return torch.stack(
            [
                vision.embed(features, tiling, adapters)
                for features, (_, tiling) in zip(on_device, found, strict=True)
            ]
        )

    def _of(self, path: Path) -> Kept:
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        computed, tiling = self._computed(path, None)
        if computed.nbytes <= self._room:
            self._room -= computed.nbytes
            self._kept[path] = (computed.cpu(), tiling)
        return computed, tiling

    @torch.no_grad()
    def _computed(self, path: Path, view: View | None) -> Kept:
        try:
            image = open_image(path, self._limits)
            if view is not None:
                image = open_image(view.of_pixels(image.pixels), self._limits)
            prepared = cut_crops(image, self._model.config.vision)
        except RequestError as error:
            raise ConfigError("data", path.name, str(error)) from error
        assert prepared.crops is not None, "crops are made here"
        tiling = prepared.tiling
        crops = torch.from_numpy(prepared.crops[: num_distinct(len(prepared.crops), tiling)])
        vision = self._model.vision
        if self._changed == TOWER:
            return vision.encode_until(crops, 0), tiling
        features = vision.encode_crops(crops)
        if self._changed == PROJECTOR:
            return features, tiling
        return vision.embed(features, tiling), tiling
