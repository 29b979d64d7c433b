"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from .budget import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Settings of the policy; the defaults suit a CPU."""

    budget: StepBudget = field(default_factory=StepBudget)
    prefix_cache: bool = True
    prefix_pages: int | None = None
    """Once so many pages were in use, cached prefixes give way before others are used for the first time. None: all."""
    kept_embeddings: int = 16
    """Number of image embeddings that are kept without a user."""
    kept_crops: int = 0
    """Number of crops whose features are kept, for equal crops of other images."""
    itl_target_s: float = 0.015
    """With two lanes: decoding waits for new work that takes no longer, and runs beside longer steps."""
    aging_s: float = 10.0
    """Seconds after which a priority that was not served counts as one better."""
    yield_s_per_position: float = 1e-3
    """Seconds of delay for each prompt position that is left. Shorter texts that arrive within the delay go first, so
    that a question of five words does not wait for documents."""
