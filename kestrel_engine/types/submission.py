"""Submission: what the engine asks of the scheduler for one request. Immutable, so threads may share it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from .adapter import Adapter
from .reading import ReadSpec
from .requests import PreparedImage, Prompt, SamplingParams
from .step import TokenRule

NUM_PRIORITIES = 3
"""0 is the best, 1 the default, 2 the least."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submission:
    """A checked request with its prompt. The scheduler makes a sequence from it."""

    sequence_id: int
    prompt: Prompt
    images: tuple[PreparedImage, ...]
    """The images of the prompt's blocks, in order."""
    sampling: SamplingParams
    rule: TokenRule | None
    """For the first token to be sampled; None: the skill gives it later."""
    max_tokens: int
    """Most tokens that will ever be sampled."""
    namespace: Hashable = ""
    """Prefixes are shared within a namespace only."""
    principal: str = ""
    """The principal that made the request. Principals share the device by ``weight``."""
    weight: float = 1.0
    priority: int = 1
    arrived_at: float = 0.0
    """An instant of the scheduler's clock, as ``deadline_at``."""
    deadline_at: float | None = None
    """After this instant the scheduler does not admit the request."""
    reads: ReadSpec | None = None
    """What to read of the encoded image. The prompt is empty then, and no token is sampled."""
    adapter: Adapter | None = None
    """Applies to all positions of the request. ``namespace`` must differ between adapters."""

    def __post_init__(self) -> None:
        assert 0 <= self.priority < NUM_PRIORITIES, self.priority
