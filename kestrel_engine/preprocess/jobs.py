"""Job: an image that waits for a decoder or is being decoded, and its rank among others."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .. import clock
from ..fair_queue import FairQueue
from ..types.requests import PreparedImage
from .decoding.costs import Cost
from .decoding.open_image import Colour
from .looks import WHOLE, Selection
from .prepared_cache import Looks

OVERTAKEN_PER_SECOND = 10.0
"""Cheaper images of the same principal may overtake an image that costs a second, if they arrive within this many
seconds after it."""

HIGH_OVERTAKES_S = 60.0
"""An image of a request of the best priority overtakes those of the same principal's other requests, if they arrived at
most this many seconds before it."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedLooks:
    """``looks``: one, or those of a Tiled image. ``seconds``: the time of the work, without the wait for a decoder."""

    looks: Looks
    seconds: float

    @property
    def image(self) -> PreparedImage:
        """The only look."""
        (look,) = self.looks
        return look


class HeaderSize(NamedTuple):
    """Width and height in pixels of an upright image, from its header."""

    width: int
    height: int


@dataclass(slots=True, eq=False)
class ImageJob:
    """An image that waits or is being decoded. ``waiters``: its callers. ``cost``: None until its header is read."""

    payload: bytes | np.ndarray | None
    """None once no request needs it."""
    principal: str
    key: bytes | None
    result: asyncio.Future[Any]
    """Gets PreparedLooks, or HeaderSize."""
    namespace: str
    background: Colour | None = None
    selection: Selection = WHOLE
    source_digest: bytes | None = None
    arrived: float = field(default_factory=lambda: clock.now())
    cost: Cost | None = None
    expensive: bool = False
    is_high: bool = False
    """Whether a request of the best priority needs it."""
    queue: FairQueue[ImageJob] | None = None
    """The queue in which it waits. Other queues may hold entries for it, which count no more."""
    waiters: int = 0
    header_only: bool = False
    """Whether the header is read and nothing decoded."""
    waits: bool = False
    """Whether its pixels count as waiting."""

    @property
    def rank(self) -> float:
        delay = OVERTAKEN_PER_SECOND * (self.cost.seconds if self.cost else 0.0)
        return self.arrived + delay - (HIGH_OVERTAKES_S if self.is_high else 0.0)

    def wait_in(self, queue: FairQueue[ImageJob]) -> None:
        self.queue = queue
        queue.push(self, self.principal, self.rank)
