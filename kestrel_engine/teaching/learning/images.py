"""The embeddings of images. The vision tower is frozen, so what it computes is kept, within a limit on memory."""

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


class ImageEmbeddings:
    """Keeps embeddings in the host's memory, the first ones up to ``most_bytes``. Others are computed again each time:
    in a pass over all images in random order, no other choice would be found more often.

    ``projected``: whether embeddings are kept, for an adapter that leaves the projector as it is; otherwise what the
    projector reads."""

    def __init__(
        self, model: Moondream, limits: ImageLimits, most_bytes: int, *, projected: bool = True
    ) -> None:
        self._model, self._limits, self._room = model, limits, most_bytes
        self._projected = projected
        self._kept: dict[Path, Tensor] = {}

    def of(self, paths: Sequence[Path], adapters: Adapters | None = None) -> Tensor:
        """Returns [len(paths), image positions, dim] on the model's device. Raises ConfigError, which names the
        file that is no image."""
        kept = torch.stack([self._of(path).to(self._model.device) for path in paths])
        return kept if self._projected else self._model.vision.projector(kept, adapters)

    def _of(self, path: Path) -> Tensor:
        kept = self._kept.get(path)
        if kept is not None:
            return kept
        embedding = self._encoded(path)
        if embedding.nbytes <= self._room:
            self._room -= embedding.nbytes
            self._kept[path] = embedding = embedding.cpu()
        return embedding

    @torch.no_grad()
    def _encoded(self, path: Path) -> Tensor:
        try:
            image = prepare(open_image(path, self._limits), self._model.config.vision)
        except RequestError as error:
            raise ConfigError("data", path.name, str(error)) from error
        assert image.crops is not None, "crops are made here"
        crops = torch.from_numpy(image.crops[: num_distinct(len(image.crops), image.tiling)])
        vision = self._model.vision
        features = vision.encode_crops(crops)
        if self._projected:
            return vision.embed(features, image.tiling)
        return torch.cat(vision.overview_and_pooled(features, image.tiling), dim=-1)
