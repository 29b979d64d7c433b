"""TeachingSettings: how an adapter is fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..adapters.targets import MAX_RANK
from ..errors import ConfigError

LAYERS = ("mlp", "attention", "all", "all+projector", "all+vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingSettings:
    """Raises ConfigError for a value outside its limits.

    ``rank``, ``alpha``: of the adapter; the change is multiplied by alpha / rank, and None stands for the rank.
    ``layers``: of the text decoder; "all+projector" adds the projector of images, "all+vision" also the vision
    tower. ``epochs``, ``minutes``: the training ends with the first of both limits. ``learning_rate``: its
    peak, after a warm-up. ``rows``: rows of one step, each an image with lessons about it.
    ``validation``: the share of images that are held out. ``patience``: epochs without a better validation loss after
    which the training ends. ``replay``: the weight of the base model's own answers; 0 leaves them out.
    ``vary``: the share by which an epoch enlarges or reduces images, and moves what they show; 0 shows
    them as they are. ``mirror``: half of these views are mirrored. ``checkpointing``: compute activations again instead
    of keeping them. ``image_bytes``: the memory for the embeddings of images; those beyond it are computed again.
    """

    rank: int = 16
    alpha: float | None = None
    layers: str = "all+projector"
    epochs: int = 20
    minutes: float | None = None
    learning_rate: float = 1e-3
    rows: int = 8
    seed: int = 0
    validation: float = 0.1
    patience: int = 4
    replay: float = 1.0
    vary: float = 0.0
    mirror: bool = False
    checkpointing: bool = False
    image_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        _whole("rank", self.rank, 1, MAX_RANK)
        _whole("epochs", self.epochs, 1, 100_000)
        _whole("rows", self.rows, 1, 1024)
        _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("patience", self.patience, 1, 100_000)
        _whole("image_bytes", self.image_bytes, 0, 1 << 50)
        if self.alpha is not None:
            _number("alpha", self.alpha, 0, 1e6)
        if self.minutes is not None:
            _number("minutes", self.minutes, 0, 1e6)
        _number("learning_rate", self.learning_rate, 0, 1)
        if not (_is_finite(self.validation) and 0 <= self.validation <= 0.5):
            raise ConfigError("validation", self.validation, "must be a number from 0 to 0.5")
        if not (_is_finite(self.replay) and 0 <= self.replay <= 100):
            raise ConfigError("replay", self.replay, "must be a number from 0 to 100")
        if not (_is_finite(self.vary) and 0 <= self.vary <= 0.5):
            raise ConfigError("vary", self.vary, "must be a number from 0 to 0.5")
        if self.mirror and not self.vary:
            raise ConfigError("mirror", True, "needs views; set --vary above 0")
        if self.layers not in LAYERS:
            raise ConfigError("layers", self.layers, f"must be one of {', '.join(LAYERS)}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, value, f"must be a whole number from {low} to {high}")


def _number(name: str, value: float, low: float, high: float) -> None:
    if not _is_finite(value) or not low < value <= high:
        raise ConfigError(name, value, f"must be a number above {low:g}, and at most {high:g}")


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
