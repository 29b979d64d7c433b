"""Executes StepPlans with plain torch on a CPU or a CUDA device. It is the reference for faster runtimes.

It owns the KV cache, and the embeddings of images from their encoding until ``drop_images``. It makes no decisions: the
plan says what to compute, where to store it and which ids may be sampled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .. import clock
from ..models.kv_format import Scales
from ..models.low_rank import OneAdapter
from ..models.moondream import Moondream
from ..models.refiner import Refiner
from ..models.region import coord_of_bin, size_of_bins
from ..types.model_config import ModelConfig
from ..types.requests import Coord, Size, num_positions
from ..types.step import (
    NEAR_BINS,
    PREVIOUS,
    EncodeSlice,
    ImageRead,
    RefineRow,
    Row,
    RuntimeLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    StepToken,
)
from .batch import RowBatch, build_batch, known
from .kept_crops import KeptCrops
from .kv_cache import KvCache
from .lost_work import LostWork
from .out_of_memory import raise_as_memory_error
from .protocol import StepHandle
from .reading import PendingReading, fetch
from .refinement import Refinement, arrays_of, results_of
from .sampler import DrawnToken, sample
from .thread_choice import ThreadChoice, limited

SMALL_PASS = 12_000_000
"""The largest number of multiply-adds of a layer's qkv projection for which a pass runs on one CPU thread.

In a small pass, threads that synchronise every few microseconds wait longer than they compute. Released models always
exceed the limit.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step that is launched and not yet collected."""

    plan: StepPlan
    result: Future[StepResult]


class TorchRuntime:
    """Implements ``protocol.Runtime``. A separate thread runs the steps in the order of their launch, so ``launch``
    never waits. A step that raises an error loses only its own rows."""

    def __init__(
        self,
        model: Moondream,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        max_seq_length: int,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_scales: Sequence[Scales] | None = None,
        refiner: Refiner | None = None,
    ) -> None:
        """``kv_scales``: the scales of each layer for an FP8 KV cache; None for a KV cache in ``dtype``."""
        device = torch.device(device)
        assert model.device.type == device.type, f"weights on {model.device}, runtime on {device}"
        assert model.dtype == dtype, f"weights are {model.dtype}, the runtime computes in {dtype}"
        assert max_seq_length <= config.text.max_context, (
            f"max_seq_length {max_seq_length} over the model's context {config.text.max_context}"
        )
        self.model = model
        self._config = config
        self._limits = RuntimeLimits(
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_seq_length=max_seq_length,
            vocab_size=config.text.vocab_size,
            refines=refiner is not None,
        )
        self._refinement = None if refiner is None else Refinement(model.vision, refiner)
        self.cache: KvCache | None = KvCache(
            config.text,
            num_pages=num_pages,
            page_size=page_size,
            dtype=dtype,
            device=model.device,
            scales=kv_scales,
        )
        self._features: dict[str, list[Tensor]] = {}
        """Features of the encoded crops of images that are incomplete or keep them, by image key."""
        self.crops = KeptCrops()
        self.images: dict[str, Tensor] = {}
        self._sampled: dict[int, StepToken] = {}
        """The token that each sequence sampled last. A row that is launched before this token is read refers to it."""
        self._choices: dict[int, ThreadChoice] = {}
        """By the number of rows of a decode pass."""
        self._lost = LostWork()
        # The thread may begin while a pass of another model limits the threads that torch gives new threads.
        self._device_thread = ThreadPoolExecutor(
            1, "kestrel-device", torch.set_num_threads, (torch.get_num_threads(),)
        )
        self._pending: deque[PendingStep] = deque()

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def untouched(self) -> Callable[[], int]:
        """As ``KvCache.untouched``."""
        assert self.cache is not None, "the runtime is closed"
        return self.cache.untouched()

    def launch(self, plan: StepPlan) -> PendingStep:
        assert self.cache is not None, "the runtime is closed"
        handle = PendingStep(plan, self._device_thread.submit(self._execute, plan))
        self._pending.append(handle)
        return handle

    def is_done(self, handle: StepHandle) -> bool:
        assert isinstance(handle, PendingStep), handle
        return handle.result.done()

    def collect(self, handle: StepHandle) -> StepResult:
        """Raises AssertionError for an invalid plan, and torch's own errors."""
        assert isinstance(handle, PendingStep), handle
        assert self._pending and self._pending[0] is handle, "steps are collected as launched"
        self._pending.popleft()
        return handle.result.result()

    def close(self) -> None:
        if self.cache is None:
            return
        self._device_thread.shutdown(wait=True)
        self._pending.clear()
        self._features.clear()
        self.crops.clear()
        self.images.clear()
        self._sampled.clear()
        self.cache = None
        # A caller may keep the engine, and with it this object, for long. The weights go now.
        del self.model, self._refinement

    def _execute(self, plan: StepPlan) -> StepResult:
        plan = self._lost.without(plan)
        try:
            return self._step(plan)
        except BaseException as error:
            self._lost.note(plan)
            raise_as_memory_error(error)
            raise

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        for key in plan.drop_images:
            self._features.pop(key, None)
            self.images.pop(key, None)
        self.crops.drop(plan.drop_crops)
        for sequence_id in plan.ended:
            self._sampled.pop(sequence_id, None)
        began = clock.now()
        self._encode(plan.encode)
        readings = {read.sequence_id: self._reading(read) for read in plan.reads}
        refined = self._refine(plan.refine)
        encoded = self._now()
        tokens, non_finite, groups = self._run(plan.prefill)
        non_finite |= {i for i, found in readings.items() if not found.is_finite}
        prefilled = self._now()
        for row in plan.decode:
            assert len(row.tokens) == 1, f"{len(row.tokens)} tokens in a decode row"
        assert len(plan.decode) <= self._limits.max_batch_size, len(plan.decode)
        decoded, also, more_groups = self._run(plan.decode)
        tokens |= decoded
        non_finite |= also
        self._sampled.update(tokens)
        # Steps that are launched already may use the tokens that these rows did not sample.
        self._lost.note_sequences(non_finite)
        return StepResult(
            tokens=tokens,
            readings={i: e.value() for i, e in readings.items() if e.is_finite},
            non_finite=frozenset(non_finite),
            refined=refined,
            shared_groups=groups + more_groups,
            vision_s=encoded - began,
            prefill_s=prefilled - encoded,
            decode_s=self._now() - prefilled,
        )

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return clock.now()

    def _encode(self, pieces: Sequence[EncodeSlice]) -> None:
        """Encodes all crops of the step, those with the same adapter in one pass."""
        by_adapter: dict[int, list[EncodeSlice]] = {}
        for piece in pieces:
            if piece.image.features is not None:
                self.images[piece.image.key] = self._of_features(piece.image.features)
                continue
            by_adapter.setdefault(id(piece.image.adapter), []).append(piece)
        for together in by_adapter.values():
            self._encode_together(together)

    def _of_features(self, features: np.ndarray) -> Tensor:
        """The embedding that a caller sent, as the tower would have made it."""
        weight = self.model.text.wte
        return torch.from_numpy(features.copy()).to(weight.device, weight.dtype)

    def _encode_together(self, pieces: Sequence[EncodeSlice]) -> None:
        """Encodes crops with the same adapter. Computes an image's embedding after its last crop."""
        adapter = pieces[0].image.adapter
        adapters = None if adapter is None else OneAdapter(adapter.weights)
        crops = []
        for piece in pieces:
            assert piece.image.crops is not None, "this runtime makes no crops"
            encoded = [index for index in piece.distinct if index not in piece.reused]
            crops.append(torch.from_numpy(piece.image.crops[encoded]))
        vision = self.model.vision
        count = sum(map(len, crops))
        features = vision.encode_crops(torch.cat(crops), adapters) if count else None
        begin = 0
        for piece in pieces:
            key = piece.image.key
            if piece.first == 0:
                self._features[key] = []
            own = features[begin : begin + piece.num_encoded] if features is not None else None
            begin += piece.num_encoded
            self._features[key] += self.crops.features(piece, own)
            if piece.last == piece.image.num_crops:
                all_features = torch.cat(self._features.pop(key))
                self.images[key] = vision.embed(all_features, piece.image.tiling, adapters)
                if piece.image.keeps_features:
                    self._features[key] = [all_features]

    def _reading(self, read: ImageRead) -> PendingReading:
        """Raises AssertionError if the image was not encoded."""
        key, spec, crops = read.image.key, read.spec, None
        assert key in self.images, f"image {key} was not encoded"
        if spec.crops:
            (features,) = self._features[key]
            adapter = read.image.adapter
            adapters = None if adapter is None else OneAdapter(adapter.weights)
            embed = self.model.vision.embed
            crops = torch.stack([embed(each[None], (1, 1), adapters) for each in features])
        return fetch(spec, self.images[key] if spec.image else None, crops)

    def _refine(self, rows: Sequence[RefineRow]) -> dict[int, np.ndarray]:
        """Returns the refined masks by sequence id."""
        if not rows:
            return {}
        assert self._refinement is not None, "this runtime has no refiner"
        pixels, masks = (torch.from_numpy(a).to(self.model.device) for a in arrays_of(rows))
        changes = [None if row.adapter is None else row.adapter.weights for row in rows]
        return results_of(rows, self._refinement(pixels, masks, changes).cpu().numpy())

    def _run(self, rows: Sequence[Row]) -> tuple[dict[int, StepToken], set[int], tuple[int, ...]]:
        """Returns the sampled token of each sequence, the sequences whose rows are not finite, and the groups of rows
        that share positions, as in StepResult.

        NaN or infinity at any position reaches the row's last position, which attends to all positions before it.
        """
        if not rows:
            return {}, set(), ()
        rows = [self._resolved(row) for row in rows]
        tokens: dict[int, StepToken] = {}
        with self._threads(rows):
            batch = self.batch(rows)
            hidden = self._hidden(batch)
            finite = torch.isfinite(hidden).all(dim=-1).tolist()
            wanted = [i for i, row in enumerate(rows) if row.sample is not None and finite[i]]
            specs = [spec for i in wanted if (spec := rows[i].sample) is not None]
            sampled = self._sample(hidden[wanted], specs) if specs else []
        for i, token in zip(wanted, sampled, strict=True):
            if token is None:
                finite[i] = False
            else:
                tokens[rows[i].sequence_id] = token
        bad = {row.sequence_id for row, good in zip(rows, finite, strict=True) if not good}
        return tokens, bad, batch.shared_groups

    @contextmanager
    def _threads(self, rows: Sequence[Row]) -> Iterator[None]:
        """Limits torch to one thread for a small pass on a CPU, and for decode in half types where that is faster."""
        threads = torch.get_num_threads()
        if threads == 1 or self.model.device.type != "cpu":
            yield
            return
        count, choice = sum(num_positions(known(row)) for row in rows), None
        if count * 3 * self._config.text.dim**2 <= SMALL_PASS:
            wanted = 1
        elif count == len(rows) and self.model.dtype.itemsize == 2:
            choice = self._choices.setdefault(count, ThreadChoice(threads))
            wanted = choice.next()
        else:
            wanted = threads
        began = clock.now()
        with limited(wanted):
            yield
        if choice is not None:
            choice.took(clock.now() - began)

    def _resolved(self, row: Row) -> Row:
        """Returns the row with PREVIOUS replaced by the token that the sequence sampled last."""
        if row.tokens[-1:] != (PREVIOUS,):
            return row
        previous = self._sampled[row.sequence_id].as_input()
        return replace(row, tokens=(*row.tokens[:-1], previous))

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Runs one forward pass and stores the rows' keys and values.

        Returns [num_rows, dim], the residual stream before ``post_ln`` at each row's last position, which
        ``model.text.logits`` and the region heads read.
        """
        return self._hidden(self.batch(rows))

    def _hidden(self, batch: RowBatch) -> Tensor:
        text = self.model.text
        return text(batch.embeddings, batch.positions, batch.attention, batch.adapters, batch.last)

    def batch(self, rows: Sequence[Row]) -> RowBatch:
        """Returns the rows as the input of one pass with this runtime's KV cache and images."""
        assert self.cache is not None, "the runtime is closed"
        for row in rows:
            self._check(row)
        return build_batch(rows, self.model, self.cache, self.images)

    def _check(self, row: Row) -> None:
        limits = self._limits
        positions = len(row.page_table) * limits.page_size
        assert positions < limits.max_seq_length + limits.page_size, (
            f"sequence {row.sequence_id}: {positions} positions, limit {limits.max_seq_length}"
        )
        assert (
            row.page_table and 0 <= min(row.page_table) <= max(row.page_table) < limits.num_pages
        ), f"sequence {row.sequence_id}: pages outside 0..{limits.num_pages - 1}"

    def _sample(self, hidden: Tensor, specs: Sequence[SampleSpec]) -> list[StepToken | None]:
        """Returns the token of each row of ``hidden`` [n, dim], or None where the logits are not finite.

        The id is forced or sampled from the vocabulary head. If the rule reads a value, it comes from a region head.
        """
        free = [i for i, spec in enumerate(specs) if spec.rule.forced is None]
        ids: list[DrawnToken | None] = [DrawnToken(spec.rule.forced or 0, 0.0) for spec in specs]
        if free:
            logits = self.model.text.logits(hidden[free])
            for i, drawn in zip(free, sample(logits, [specs[i] for i in free]), strict=True):
                ids[i] = drawn
        special = self._config.ids
        kinds = [-1 if drawn is None else drawn.id for drawn in ids]
        coords = [
            i for i, s in enumerate(specs) if s.rule.read_coord and kinds[i] == special.coord_id
        ]
        sizes = [i for i, s in enumerate(specs) if s.rule.read_size and kinds[i] == special.size_id]
        values: dict[int, tuple[Coord | Size, float]] = {}
        if coords:
            values.update(zip(coords, self._read_coords(hidden[coords]), strict=True))
        if sizes:
            values.update(zip(sizes, self._read_sizes(hidden[sizes]), strict=True))
        tokens: list[StepToken | None] = []
        for i, drawn in enumerate(ids):
            value, near = values.get(i, (None, None))
            if drawn is None or (near is not None and math.isnan(near)):
                tokens.append(None)
            else:
                tokens.append(StepToken(drawn.id, value, drawn.logprob, near, drawn.top))
        return tokens

    def _read_coords(self, hidden: Tensor) -> list[tuple[Coord, float]]:
        """Returns values and the probabilities of the values near them, which are NaN where a logit is not finite."""
        logits = self.model.region.coord_logits(hidden)
        bins, near = read_bins(logits)
        return [
            (coord_of_bin(index, logits.shape[-1]), probability)
            for index, probability in zip(bins.tolist(), near.tolist(), strict=True)
        ]

    def _read_sizes(self, hidden: Tensor) -> list[tuple[Size, float]]:
        """As `_read_coords`, for sizes."""
        logits = self.model.region.size_logits(hidden)
        bins, near = read_bins(logits)
        return [
            (size_of_bins(w, h, logits.shape[-1]), probability)
            for (w, h), probability in zip(bins.tolist(), near.prod(dim=-1).tolist(), strict=True)
        ]


def read_bins(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best bin of each row of ``logits`` [..., bins] float32, and the probability of the bins within
    NEAR_BINS of it. The probability is NaN where a logit is not finite."""
    # Minus infinity alone would not make the row's probabilities NaN.
    finite = logits.masked_fill(~torch.isfinite(logits), math.nan)
    best = finite.argmax(dim=-1, keepdim=True)
    distance = (torch.arange(logits.shape[-1], device=logits.device) - best).abs()
    near = finite.softmax(dim=-1).masked_fill(distance > NEAR_BINS, 0.0).sum(dim=-1)
    return best.squeeze(-1), near.clamp(max=1.0)
