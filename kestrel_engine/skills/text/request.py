"""TextRequest: a request for text, with its constraint and the objects that it presupposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...types.constraint import Constraint
from ...types.events import EngineResult, FinishReason
from ...types.requests import PreparedImage, PreparedTiles
from ..base import EngineServices, SkillRequest
from ..constraints.grammars import Grammar
from ..presupposed import Presence, Presupposed
from .penalties import Penalties


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(SkillRequest):
    """``stop``: strings before which the text ends. ``logprobs``: whether its tokens have log-probabilities, and each
    ``top_logprobs`` alternatives."""

    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    penalties: Penalties | None = None
    constraint: Constraint | Grammar | None = None
    """What the text must match. It is compiled when a control is made."""
    presupposed: Presupposed | None = None
    """The objects without which the request is not answered. It needs an image then."""
    presence: Presence | None = None
    """What the engine found of them."""

    async def before_images(self, engine: EngineServices) -> TextRequest:
        if not isinstance(self.constraint, Constraint):
            return self
        return replace(self, constraint=await engine.compiled(self.constraint))

    async def after_images(
        self, engine: EngineServices, images: Sequence[PreparedImage | PreparedTiles]
    ) -> TextRequest:
        if self.presupposed is None:
            return self
        whole = [image for image in images if isinstance(image, PreparedImage)]
        return replace(self, presence=await self.presupposed.found(engine, whole))

    @property
    def ends_at_once(self) -> FinishReason | None:
        if self.presupposed is None or self.presence is None:
            return None
        return self.presence.ending(self.presupposed.max_absence)

    def added_to(self, result: EngineResult) -> EngineResult:
        return result if self.presence is None else self.presence.added_to(result)
