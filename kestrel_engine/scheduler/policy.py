"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from .budget import StepBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPolicy:
    """Settings of the policy; the defaults suit a CPU."""

    budget: StepBudget = field(default_factory=StepBudget)
    prefix_cache: bool = True
    kept_embeddings: int = 16
    """Embeddings of images kept although nobody needs them now."""
    aging_s: float = 10.0
    """A priority that was not served for so many seconds counts as one better."""
    yield_s_per_position: float = 1e-3
    """For each position left of its prompt a text is computed after shorter ones that came so much later: a question
    of five words need not wait for documents."""
