"""Scheduled: the scheduler's record of a row in a step that is out."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Sequence


@dataclass(slots=True)
class Scheduled:
    """One sequence's row in a step that is out: where it ends, and in which epoch it was made. Never changed; not
    frozen because one is made for every token, and that would double its cost."""

    sequence: Sequence
    epoch: int
    end_positions: int
    samples: bool
    is_prefill: bool
    images: tuple[str, ...]
    """Keys of the images that the row computes."""
