"""The embeddings of images. What no adapter changes is computed once and kept, within a limit on memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...config.images import ImageLimits
from ...errors import ConfigError, RequestError
from ...models.low_rank import Adapters
from ...models.moondream import Moondream
from ...models.vision import num_distinct
from ...preprocess.crops import prepare
from ...preprocess.decoding.images import open_image

NOTHING, PROJECTOR = -1, 0
"""What an adapter changes first, besides the blocks of the tower from 1 on."""


class ImageEmbeddings:
    """Keeps what is computed of images in the host's memory, the first ones up to ``most_bytes``. Others are computed
    again each time: in a pass over all images in random order, no other choice would be found more often.

    ``changed``: the first part that the adapter changes. What it reads is kept: for NOTHING the embeddings, for
    PROJECTOR the features, for a block of the tower the residual stream before it."""

    def __init__(
        self,
        model: Moondream,
        limits: ImageLimits,
        most_bytes: int,
        *,
        changed: int = NOTHING,
    ) -> None:
        self._model, self._limits, self._room = model, limits, most_bytes
        self._changed = changed
        self._kept: dict[Path, tuple[Tensor, tuple[int, int]]] = {}

    def of(self, paths: Sequence[Path], adapters: Adapters | None = None) -> Tensor:
        """Returns [len(paths), image positions, dim] on the model's device. Raises ConfigError, which names the
        file that is no image."""
        return torch.stack([self._embedded(*self._of(path), adapters) for path in paths])

    def _embedded(self, kept: Tensor, tiling: tuple[int, int], adapters: Adapters | None) -> Tensor:
        vision, x = self._model.vision, kept.to(self._model.device)
        if self._changed == NOTHING:
            return x
        if self._changed != PROJECTOR:
            for block in vision.blocks[self._changed :]:
                x = block(x, adapters)
            x = vision.post_ln(x)
        return vision.embed(x, tiling, adapters)

    def _of(self, path: Path) -> tuple[Tensor, tuple[int, int]]:
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        computed, tiling = self._computed(path)
        if computed.nbytes <= self._room:
            self._room -= computed.nbytes
            self._kept[path] = (computed.cpu(), tiling)
        return computed, tiling

    @torch.no_grad()
    def _computed(self, path: Path) -> tuple[Tensor, tuple[int, int]]:
        try:
            image = prepare(open_image(path, self._limits), self._model.config.vision)
        except RequestError as error:
            raise ConfigError("data", path.name, str(error)) from error
        assert image.crops is not None, "crops are made here"
        crops = torch.from_numpy(image.crops[: num_distinct(len(image.crops), image.tiling)])
        vision = self._model.vision
        if self._changed > 0:
            return vision.encode_until(crops, self._changed), image.tiling
        features = vision.encode_crops(crops)
        if self._changed == PROJECTOR:
            return features, image.tiling
        return vision.embed(features, image.tiling), image.tiling
