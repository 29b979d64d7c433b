"""TeachingSettings: how an adapter is fitted."""

from __future__ import annotations

from dataclasses import dataclass

from ..adapters.targets import MAX_RANK
from ..config.setting import SettingGroup, check_settings, checked
from ..errors import ConfigError

LAYERS = ("mlp", "attention", "all", "all+projector", "all+vision")
TRAINING = SettingGroup("training", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachingSettings:
    """The training ends with the first of its limits. Raises ConfigError for a value outside its limits."""

    rank: int = TRAINING.setting(16, "rank of the adapter", low=1, high=MAX_RANK)
    alpha: float | None = TRAINING.setting(
        None, "the change is multiplied by alpha / rank", above=0, high=1e6, shown="the rank"
    )
    layers: str = TRAINING.setting(
        "all+projector",
        "layers of the text decoder that the adapter changes; all+projector: the projector of images too; all+vision: "
        "the projector and the vision tower too",
        choices=LAYERS,
    )
    epochs: int = TRAINING.setting(20, "limit on the passes over all images", low=1, high=100_000)
    minutes: float | None = TRAINING.setting(
        None,
        "limit on the minutes of training, without loading and measuring",
        above=0,
        high=1e6,
        shown="no limit",
    )
    learning_rate: float = TRAINING.setting(
        1e-3, "peak of the learning rate, after a warm-up", flag="--lr", above=0, high=1
    )
    rows: int = TRAINING.setting(8, "images of one step", low=1, high=1024)
    seed: int = checked(0, low=0, high=2**63 - 1)
    validation: float = TRAINING.setting(
        0.1, "share of the images that are held out", low=0, high=0.5
    )
    patience: int = TRAINING.setting(
        4, "end after this many epochs without a better validation loss", low=1, high=100_000
    )
    replay: float = TRAINING.setting(
        1.0,
        "weight of the base model's own answers, so that the model keeps what it knew; 0: none",
        low=0,
        high=100,
    )
    vary: float = TRAINING.setting(
        0.0,
        "share by which each epoch enlarges or reduces images, and moves what they show, with their labels",
        low=0,
        high=0.5,
    )
    mirror: bool = TRAINING.setting(
        False,
        "mirror half of the images of --vary too: only if no label depends on left and right, or is a text",
    )
    checkpointing: bool = TRAINING.setting(
        False, "compute activations again instead of keeping them: less memory, a third more time"
    )
    image_bytes: int = TRAINING.setting(
        2 << 30,
        "limit on the memory for embeddings of images; those beyond it are computed again",
        flag="--image-memory",
        low=0,
        high=1 << 50,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.mirror and not self.vary:
            raise ConfigError("mirror", self.mirror, "needs views; set --vary above 0")
