"""The losses: words of an answer, bins of coordinates and sizes, and the decision for one more object or the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.moondream import Moondream
from .packing import LessonBatch, Targets

END_WEIGHT, COORD_WEIGHT, SIZE_WEIGHT = 1.0, 0.3, 0.2
SIGMA = 2.0
"""Bins. The label of a coordinate or size is a normal distribution around its bin, because labels are not exact, and so
that near misses cost less."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The parts of a batch's loss, each the weighted mean over its targets, 0 without a target."""

    words: Tensor
    ends: Tensor
    coords: Tensor
    sizes: Tensor

    @property
    def total(self) -> Tensor:
        return (
            self.words
            + END_WEIGHT * self.ends
            + COORD_WEIGHT * self.coords
            + SIZE_WEIGHT * self.sizes
        )


def loss_of(model: Moondream, hidden: Tensor, batch: LessonBatch) -> Loss:
    """``hidden``: [rows * length, dim], the residual stream of the text positions."""

    def mean(of: Callable[[Moondream, Tensor, Targets], Tensor], targets: Targets) -> Tensor:
        if not len(targets.at):
            return torch.zeros((), device=hidden.device)
        losses = of(model, hidden[targets.at], targets)
        return (losses * targets.weights).sum() / targets.weights.sum()

    return Loss(
        mean(_words, batch.words),
        mean(partial(_ends, pairs=batch.pairs), batch.ends),
        mean(_coords, batch.coords),
        mean(_sizes, batch.sizes),
    )


def _words(model: Moondream, hidden: Tensor, targets: Targets) -> Tensor:
    logits = model.text.logits(hidden)
    return F.cross_entropy(logits, targets.values, reduction="none")


def _ends(model: Moondream, hidden: Tensor, targets: Targets, *, pairs: Tensor) -> Tensor:
    """The cross-entropy [n] of the decisions. Each is between the end token and what else its rule allows."""
    ids = model.config.ids
    logits = model.text.logits(hidden)
    end, coord = logits[:, ids.eos_id], logits[:, ids.coord_id]
    is_end = torch.arange(logits.shape[-1], device=logits.device) == ids.eos_id
    any_other = logits.masked_fill(is_end, -torch.inf).logsumexp(dim=-1)
    other = torch.where(pairs, coord, any_other)
    return F.cross_entropy(torch.stack([other, end], dim=-1), targets.values, reduction="none")


def _coords(model: Moondream, hidden: Tensor, targets: Targets) -> Tensor:
    return _bins(model.region.coord_logits(hidden), targets)


def _sizes(model: Moondream, hidden: Tensor, targets: Targets) -> Tensor:
    return _bins(model.region.size_logits(hidden), targets)


def _bins(logits: Tensor, targets: Targets) -> Tensor:
    """The cross-entropy [n] of ``logits`` [n, ..., bins]; that of width and height is added."""
    bins = torch.arange(logits.shape[-1], device=logits.device)
    distance = (bins - targets.values.unsqueeze(-1)) / SIGMA
    labels = torch.softmax(-0.5 * distance**2, dim=-1)
    losses = -(labels * logits.log_softmax(dim=-1)).sum(-1)
    return losses if losses.dim() == 1 else losses.sum(-1)
