"""ReadSpec: what a request reads of an encoded image in place of tokens.

Scheduler and steps pass it on. The runtime's `reading` knows each kind.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReadSpec:
    """Which features are read. At least one of ``image`` and ``crops`` is set."""

    image: bool = True
    """Those of the whole image, all crops merged."""
    crops: bool = False
    """Those of the crops: the overview first, then the tiles row by row. An image of a single tile has one crop."""
