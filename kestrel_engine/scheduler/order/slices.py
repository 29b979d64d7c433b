"""Slices: whether a short step beside decoding computes crops or prompts (StepBudget.slices). Owns how many steps
prompts have waited.

The tower encodes a dozen crops nearly as fast as many. But a prefill pass of one image takes nearly twice the time of
an image among four. So crops fill a step, and prompts of several images another one.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from ..budget import MOST_HELD, StepBudget
from ..memory.image_memory import ImageMemory
from ..sequence import Sequence


class Slices:
    """``choose`` for each step beside decoding that may hold new work."""

    def __init__(self, budget: StepBudget, images: ImageMemory) -> None:
        self._budget, self._images = budget, images
        self._num_held = 0
        """Steps of crops while prompts were ready, since the last step of prompts."""
        self._chose_prompts = False

    def choose(self, order: Several[Sequence]) -> tuple[list[Sequence], bool]:
        """Chooses from ``order``, which is not empty: sequences whose crops the step encodes, or whose prompts it
        computes. Returns them in order, and whether they are the former.

        While there are both, no two steps of prompts follow one another, and a prompt waits for at most MOST_HELD steps
        of crops.
        """
        ready = [sequence for sequence in order if self._is_ready(sequence)]
        others = [sequence for sequence in order if not self._is_ready(sequence)]
        is_due = self._num_held >= MOST_HELD or (self._fill(ready) and not self._chose_prompts)
        self._chose_prompts = not others or (bool(ready) and is_due)
        if self._chose_prompts:
            self._num_held = 0
            return ready, False
        self._num_held += bool(ready)
        return others, True

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether the next positions of its prompt need no further crops."""
        needed = sequence.needed
        return not needed or self._images.is_encoded(needed[0].image.key)

    def _fill(self, ready: Several[Sequence]) -> bool:
        """Whether a step has no room for one more prompt like the longest of these."""
        left = [sequence.num_positions - sequence.num_scheduled for sequence in ready]
        return sum(left) + max(left, default=0) > self._budget.prefill_positions
