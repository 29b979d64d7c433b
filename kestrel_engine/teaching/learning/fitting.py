"""The optimiser's loop: epochs over all rows, warm-up and cosine, validation, and early stop."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ... import clock
from ...errors import RuntimeFailure
from ...models.attention import PrefixAttention
from ...models.low_rank import TextAdapters
from ...models.moondream import Moondream
from ..data.lessons import Lesson
from ..data.views import View, Views
from ..settings import TeachingSettings
from .image_embeddings import ImageEmbeddings
from .losses import loss_of
from .packing import LessonBatch, RowPlan, pack, rows_of
from .parameters import Parameters

WARM_STEPS = 10
LEAST_RATE = 0.02
"""The learning rate at the end, as a part of its peak."""
SORTED_BATCHES = 8
"""So many batches of rows, in random order, are sorted by length before they are divided."""
VIEWS_TRIED = 4
"""Views of an image that are drawn to find one that shows all labelled objects."""
MOST_NORM = 1.0
"""Gradients are scaled down to this norm."""
SURE = 2.0
"""Standard errors by which earlier parameters must be better than the last ones to be kept instead. On a few held-out
images, a better loss in mid-training is mostly chance."""


@dataclass(frozen=True, slots=True)
class ImageLessons:
    """An image and all lessons about it. ``replayed``: those that are answers of the base model."""

    path: Path
    lessons: tuple[Lesson, ...]
    replayed: tuple[Lesson, ...] = ()


@dataclass(frozen=True, slots=True)
class FitStep:
    """How far the training is. ``num_steps``: in total, an estimate where a time limit ends it. ``validation``: the
    last validation loss; None without held-out images."""

    step: int
    num_steps: int
    epoch: int
    loss: float
    validation: float | None


@dataclass(frozen=True, slots=True)
class FitResult:
    """``first_loss``: the validation loss before the first step. ``best_loss``: that of the parameters which were kept.
    ``ended``: why the training ended: "epochs", "minutes" or "patience". ``peak_bytes``: of the device's memory, 0 on a
    CPU. Losses are those of the training where nothing is held out."""

    steps: int
    epochs: int
    seconds: float
    seconds_a_step: float
    peak_bytes: int
    first_loss: float
    best_loss: float
    ended: str


class Fitting:
    """Fits ``parameters`` for a model whose weights stay as they are."""

    def __init__(
        self,
        model: Moondream,
        parameters: Parameters,
        images: ImageEmbeddings,
        settings: TeachingSettings,
        report: Callable[[FitStep], None] | None = None,
    ) -> None:
        self._model, self._parameters, self._images = model, parameters, images
        self._settings, self._report = settings, report
        self._optimiser = torch.optim.AdamW(
            parameters.groups, lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
        )
        self._rng = random.Random(settings.seed)
        self._views = Views(settings.vary, settings.mirror, self._rng)

    def run(self, training: Sequence[ImageLessons], held_out: Sequence[ImageLessons]) -> FitResult:
        """Fits, and leaves the last parameters, or the best earlier ones if the held-out images prove these better.

        If patience ended the training, the learning rate was still high, so it leaves the parameters with the best
        validation loss. Without held-out images it leaves the last. Raises RuntimeFailure if a loss is not finite, and
        ConfigError for an image that cannot be read.
        """
        settings = self._settings
        device = self._model.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        per_epoch = len(self.batches(training))
        total = per_epoch * settings.epochs
        checked = held_out or training
        best = last = self.losses(checked)
        first = fmean(best)
        state, stale, step, epoch = self._parameters.state(), 0, 0, 0
        validation: float | None = first if held_out else None
        began, in_steps = clock.now(), 0.0
        ended, progress = "epochs", 0.0
        while ended == "epochs" and epoch < settings.epochs:
            epoch += 1
            for rows in self.batches(training):
                step_began = clock.now()
                loss = self._step(rows, _rate(step, progress))
                now = clock.now()
                in_steps, step = in_steps + now - step_began, step + 1
                progress = step / total
                if settings.minutes is not None:
                    progress = max(progress, (now - began) / (60 * settings.minutes))
                if self._report is not None:
                    estimate = max(step, round(step / progress))
                    self._report(FitStep(step, estimate, epoch, loss, validation))
                if progress >= 1:
                    ended = "minutes" if step < total else "epochs"
                    break
            if held_out:
                last = self.losses(held_out)
                validation = fmean(last)
                if validation < fmean(best):
                    best, state, stale = last, self._parameters.state(), 0
                else:
                    stale += 1
                if stale >= settings.patience and progress < 1:
                    ended = "patience"
            if progress >= 1:
                break
        if not held_out:
            last = self.losses(training)
        elif ended == "patience" or _is_surely_better(best, last):
            self._parameters.load(state)
            last = best
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        seconds = clock.now() - began
        return FitResult(
            step, epoch, seconds, in_steps / max(step, 1), peak, first, fmean(last), ended
        )

    @torch.no_grad()
    def losses(self, images: Sequence[ImageLessons]) -> list[float]:
        """The loss of each row of ``images``, in their order."""
        rows = [
            row
            for image in images
            for row in rows_of(image.path, (*image.lessons, *image.replayed))
        ]
        return [self._finite(float(self._loss([row]))) for row in rows]

    def batches(self, images: Sequence[ImageLessons]) -> list[list[RowPlan]]:
        """All rows of an epoch in random order. Those of a batch have similar lengths, because all are computed as long
        as the longest of them."""
        rows = []
        for image in images:
            view, lessons = self._viewed(image)
            self._rng.shuffle(lessons)
            rows += rows_of(image.path, lessons, view)
        self._rng.shuffle(rows)
        size = self._settings.rows
        batches = []
        for begin in range(0, len(rows), size * SORTED_BATCHES):
            some = sorted(rows[begin : begin + size * SORTED_BATCHES], key=_length)
            batches += [some[at : at + size] for at in range(0, len(some), size)]
        self._rng.shuffle(batches)
        return batches

    def _viewed(self, image: ImageLessons) -> tuple[View | None, list[Lesson]]:
        """A view of the image that shows all objects of its labels, or None, and the lessons that are true of it."""
        for _ in range(VIEWS_TRIED):
            view = self._views.draw()
            if view is None:
                break
            seen = [view.of_lesson(lesson) for lesson in image.lessons]
            lessons = [lesson for lesson in seen if lesson is not None]
            if len(lessons) < len(seen):
                continue
            for lesson in image.replayed:
                # The base model's words may say left and right.
                replayed = None if view.is_mirrored and lesson.words else view.of_lesson(lesson)
                if replayed is not None:
                    lessons.append(replayed)
            return view, lessons
        return None, [*image.lessons, *image.replayed]

    def _step(self, rows: Sequence[RowPlan], rate: float) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.learning_rate * rate * group["factor"]
        loss = self._loss(rows)
        value = self._finite(float(loss.detach()))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters.tensors, MOST_NORM)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return value

    def _loss(self, rows: Sequence[RowPlan]) -> torch.Tensor:
        model = self._model
        batch = pack(rows, model)
        adapter = self._parameters.adapter(model.dtype)
        images = self._images.of([row.path for row in rows], adapter, [row.view for row in rows])
        stream = hidden(model, images, batch, adapter, self._settings.checkpointing)
        return loss_of(model, stream, batch).total

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            raise RuntimeFailure(
                f"the loss is {loss}; set a smaller learning rate than {self._settings.learning_rate:g}"
            )
        return loss


def _is_surely_better(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the losses ``some`` are lower than ``others`` of the same rows by more than chance explains."""
    if len(some) < 2:
        return False
    gains = [other - one for one, other in zip(some, others, strict=True)]
    return fmean(gains) > SURE * stdev(gains) / math.sqrt(len(gains))


def _length(row: RowPlan) -> int:
    return sum(map(len, row.lessons))


def _rate(step: int, progress: float) -> float:
    """The learning rate as a part of its peak: a linear warm-up, then a cosine."""
    cosine = LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return cosine * min(1.0, (step + 1) / WARM_STEPS)


def hidden(
    model: Moondream,
    images: Tensor,
    batch: LessonBatch,
    adapters: TextAdapters | None,
    checkpointing: bool = False,
) -> Tensor:
    """Returns the residual stream before ``post_ln`` at the text positions, [rows * length, dim].

    ``images``: the embedding of each row's image, [rows, image positions, dim].
    """
    rows, _, dim = batch.text.shape
    bos = model.text.embed(torch.tensor([model.config.ids.bos_id], device=model.device))
    x = torch.cat([bos.expand(rows, 1, dim), images, batch.text], dim=1)
    before = torch.arange(model.config.image_prefix, device=model.device).expand(rows, -1)
    placement = model.text.place(torch.cat([before, batch.positions], dim=1).flatten())
    mask = _mask(batch.lessons, before.shape[1])
    flat = x.flatten(0, 1)
    length = batch.text.shape[1]
    numbers = torch.arange(len(flat), device=model.device).view(rows, -1)
    # Nothing reads the other positions after the last block.
    texts = numbers[:, -length:].flatten()
    last = model.text.blocks[-1]
    for block in model.text.blocks:
        kept = texts if block is last else None
        attention = PrefixAttention(mask, text_only=block is last)
        if checkpointing:
            rest = (placement, attention, adapters, kept)
            flat = checkpoint(block, flat, *rest, use_reentrant=False)
        else:
            flat = block(flat, placement, attention, adapters, kept)
    return flat


def _mask(lessons: Tensor, prefix: int) -> Tensor:
    """Which keys each text position attends to, [rows, 1, length, prefix + length] bool: BOS and the image, and the
    tokens of its own lesson up to itself."""
    rows, length = lessons.shape
    same = lessons[:, :, None] == lessons[:, None, :]
    seen = same & same.new_ones(length, length).tril()
    return torch.cat([same.new_ones(rows, length, prefix), seen], dim=2)[:, None]
