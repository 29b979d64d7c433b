"""Refining: what the delivery thread does for a refined outline, before and after the device.

Owns the regions of the requests whose masks are being refined. A fault here leaves the coarse outline.
"""

from __future__ import annotations

import logging

import numpy as np

from ..outlines.coarse_mask import draw
from ..outlines.region import Region, crop
from ..outlines.trace import trace
from ..skills.base import SkillOutput
from ..skills.objects.outline import OutlineOutput
from ..types.model_config import VisionConfig
from ..types.requests import PreparedImage
from ..types.step import RefineRow

logger = logging.getLogger(__name__)


LONGEST_PATH = 8192
"""Characters. A longer path is not refined: it has some 200 curves, and drawing it would delay other requests."""


class Refining:
    """``begin`` and ``finish`` for each request, on one thread."""

    def __init__(self, vision: VisionConfig) -> None:
        self._vision = vision
        self._regions: dict[int, Region] = {}

    def begin(
        self, sequence_id: int, output: SkillOutput, image: PreparedImage
    ) -> RefineRow | None:
        """Returns the work for the device; None if the finished ``output`` has no outline with anything inside, or one
        that is too long."""
        outline = output.outline if isinstance(output, OutlineOutput) else None
        if outline is None:
            return None
        path, box = outline
        if len(path) > LONGEST_PATH:
            return None
        try:
            region = Region.around(box)
            if region is None:
                return None
            mask = draw(path, box, region, self._vision.crop_size)
            if not mask.any():
                return None
            adapter = image.adapter
            if adapter is not None and not adapter.changes_tower:
                adapter = None
            row = RefineRow(sequence_id, crop(image, region, self._vision), mask, adapter)
        except Exception:
            logger.exception("the outline of sequence %d can't be refined", sequence_id)
            return None
        self._regions[sequence_id] = region
        return row

    def finish(self, sequence_id: int, output: OutlineOutput, mask: object | None) -> None:
        """Gives ``output`` the outline of the refined ``mask``. None: the coarse outline stays."""
        region = self._regions.pop(sequence_id, None)
        if region is None or not isinstance(mask, np.ndarray):
            return
        try:
            outline = trace(mask, region)
            if outline is not None:
                output.set_outline(outline)
        except Exception:
            logger.exception("the refined mask of sequence %d can't be traced", sequence_id)
