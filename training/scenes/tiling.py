"""How large kestrel-tiny sees what an image of a given size shows."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.model_config import VisionConfig

TINY = VisionConfig(enc_patch_size=14, crop_size=252, overlap_margin=2, max_crops=6)


@dataclass(frozen=True)
class View:
    """An image's size, and the pixels of the tiled view and of the global crop per image pixel, x and y."""

    width: int
    height: int
    tiled_scale: tuple[float, float]
    global_scale: tuple[float, float]

    @classmethod
    def of(cls, width: int, height: int) -> View:
        window, side = TINY.crop_window, TINY.crop_size
        down, across = (window * (n - 1) + side for n in select_tiling(width, height, TINY))
        return cls(width, height, (across / width, down / height), (side / width, side / height))
