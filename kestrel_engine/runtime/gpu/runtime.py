"""GpuRuntime: executes StepPlans with Triton kernels and captured passes.

It enqueues a step without waiting: a decode pass, then images, then prompts. The token that a sequence samples stays on
the device as the input of its next row. The runtime owns the KV cache, the embeddings of images and the per-sequence
state on the device. It makes no decisions. If Triton interprets its kernels, the runtime also works on CPU tensors,
without streams and graphs.

With two lanes (types.step.Lane), decode steps run on a stream of high priority beside the others (lanes.py). Nothing
that a pass writes is shared between the two, but for the rows of different sequences in the KV cache, in the page table
and in the sampled tokens. Each lane has its own buffers, graphs, and cuBLAS workspaces, which torch keeps by stream.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ... import clock
from ...kernels.decode_io import flag_rows
from ...models.moondream import Moondream
from ...types.model_config import ModelConfig
from ...types.progress import Progress
from ...types.step import (
    MOST_REFINED,
    Lane,
    RefineRow,
    Row,
    RuntimeLimits,
    StepPlan,
    StepResult,
)
from ..lost_work import LostWork
from ..out_of_memory import raise_as_memory_error
from ..protocol import StepHandle
from ..refinement import arrays_of
from .capture import first_fork
from .parts import Options, Parts
from .step_results import PassOutput, PendingStep
from .streams import record
from .text.decoder import FusedText
from .vision.tower import FusedVision

logger = logging.getLogger(__name__)


class GpuRuntime:
    """Implements ``protocol.Runtime``.

    ``tensors``: a complete checkpoint, by canonical names without ``model.``, on one device. Experts may be in FP8. The
    runtime takes ownership: it packs the tensors and replaces the entries by views.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        options: Options,
        progress: Progress | None = None,
    ) -> None:
        """Captures the graphs on a CUDA device, unless the options say otherwise, and calls ``progress`` for each.

        Raises ConfigError for an attention library or an FP8 setting that is not available, and torch's own errors.
        """
        most = config.text.max_context
        assert options.max_seq_length <= most, (options.max_seq_length, most)
        self._config, self._layout = config, options.adapters
        self.parts = Parts(config, tensors, options)
        self._limits, self._stream = self.parts.limits, self.parts.stream
        self._lost = LostWork()
        self._pending: dict[Lane, deque[PendingStep]] = {lane: deque() for lane in Lane}
        self._closed = self._warm = False
        self._captured = self._stream is not None and options.cuda_graphs
        self._kept_graphs: list[torch.cuda.CUDAGraph] = []
        self.capture_s = 0.0
        """Seconds for capturing the graphs, including the compilation of missing kernels."""
        if self._stream is not None:
            # Other streams loaded the weights.
            torch.cuda.synchronize(self.model.device)
            if self._captured:
                began = clock.now()
                self._capture(progress)
                self.capture_s = clock.now() - began

    @property
    def model(self) -> Moondream:
        return self.parts.model

    @property
    def text(self) -> FusedText:
        return self.parts.text

    @property
    def vision(self) -> FusedVision:
        return self.parts.vision

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises AssertionError for an invalid plan, MemoryError, and torch's own errors. After an error, the plan's
        rows are lost."""
        assert not self._closed, "the runtime is closed"
        plan = self._lost.without(plan)
        try:
            if not self._warm:
                with self._on_stream():
                    self._warm_up()
                self.parts.lanes.synchronize()
            with torch.inference_mode(), self.parts.lanes.of(plan):
                handle = self._enqueue(plan)
        except BaseException as error:
            self._lost.note(plan)
            self.parts.state.unhold(plan.step_id)
            # A part of the step may run. Its pages will be free, and the other lane may write to them.
            with contextlib.suppress(Exception):
                self.parts.lanes.synchronize()
            raise_as_memory_error(error)
            raise
        self._pending[plan.lane].append(handle)
        return handle

    def is_done(self, handle: StepHandle) -> bool:
        assert isinstance(handle, PendingStep), handle
        return handle.is_done

    def collect(self, handle: StepHandle) -> StepResult:
        """Raises MemoryError, and torch's own errors."""
        assert isinstance(handle, PendingStep), handle
        pending = self._pending[handle.plan.lane]
        assert pending and pending[0] is handle, "steps are collected as launched"
        pending.popleft()
        self.parts.state.unhold(handle.plan.step_id)
        try:
            return self.parts.results.read(handle)
        except BaseException as error:
            self._lost.note(handle.plan)
            raise_as_memory_error(error)
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.parts.lanes.synchronize()
        for pending in self._pending.values():
            pending.clear()
        self.parts.close()
        self._kept_graphs.clear()
        # A caller may keep the engine, and with it this object, for long. What holds device memory goes now. The
        # streams go to the next model, which then needs no further workspaces of cuBLAS.
        del self.parts, self._stream

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Runs one prefill pass without sampling, and stores its keys and values.

        Returns [num_rows, dim], the residual stream before ``post_ln`` at each row's last position.
        """
        with self._on_stream():
            for row in rows:
                self.parts.state.check(row)
            found = self.parts.prompts.run(rows, None)
        if self._stream is not None:
            # The caller reads the result on another stream.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return found

    @torch.inference_mode()
    def encode_crops(self, crops: Tensor) -> Tensor:
        """As `FusedVision.encode_crops`, with captured passes, on the current stream. No step may be in flight."""
        return self.parts.images.encode_crops(crops)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            with torch.inference_mode():
                yield
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> torch.cuda.Event | float:
        if self._stream is None:
            return clock.now()
        event = torch.cuda.Event(enable_timing=True)
        record(event, self._stream.device)
        return event

    def _enqueue(self, plan: StepPlan) -> PendingStep:
        self.parts.images.drop(plan.drop_images, plan.drop_crops)
        for sequence_id in plan.ended:
            self.parts.state.release(sequence_id)
        outputs: list[PassOutput] = []
        flags: list[tuple[Sequence[Row], Tensor]] = []
        groups: tuple[int, ...] = ()
        marks = [self._mark()]
        # The rows of a step don't depend on one another. Decode goes first, so the host prepares images while it runs.
        if plan.decode:
            sampled, tops = self.parts.decode.run(plan.decode, plan.step_id)
            outputs.append(self.parts.results.output(plan.decode, sampled, tops))
            groups = self.parts.decode.shared_groups
        # A part without work ends where the part before it does.
        marks.append(self._mark() if plan.decode else marks[-1])
        self.parts.images.encode(plan.encode, leave_room=plan.leave_room)
        readings = {read.sequence_id: self.parts.images.reading(read) for read in plan.reads}
        refined = self._refine(plan.refine) if plan.refine else None
        looks = plan.encode or plan.reads or plan.refine
        marks.append(self._mark() if looks else marks[-1])
        for rows in self.parts.prompts.passes(plan.prefill):
            self._prefill(rows, plan, outputs, flags)
        marks.append(self._mark() if plan.prefill else marks[-1])
        self.parts.lanes.enqueued(plan, marks[-1])
        return PendingStep(plan, readings, outputs, groups, flags, refined, marks)

    def _refine(self, rows: Sequence[RefineRow]) -> Tensor:
        """Enqueues the refinement of masks, and the copy of the results to the host."""
        assert self.parts.refinement is not None, "this runtime has no refiner"
        pixels, masks = arrays_of(rows)
        sent = self.parts.upload({"pixels": pixels, "masks": masks})
        adapters = {id(row.adapter): row.adapter for row in rows}
        changes = {
            key: None if adapter is None or self._layout is None else self._layout.unpacked(adapter)
            for key, adapter in adapters.items()
        }
        refined = self.parts.refinement(
            sent["pixels"], sent["masks"], [changes[id(row.adapter)] for row in rows]
        )
        host = torch.empty(refined.shape, pin_memory=self._stream is not None)
        host.copy_(refined, non_blocking=True)
        return host

    # Prompts.

    def _prefill(
        self,
        rows: Sequence[Row],
        plan: StepPlan,
        outputs: list[PassOutput],
        flags: list[tuple[Sequence[Row], Tensor]],
    ) -> None:
        """Enqueues one prefill pass and adds its results to ``outputs`` and ``flags``."""
        for row in rows:
            self.parts.state.check(row)
        seqs = self.parts.state.assign(rows, plan.step_id, hold=plan.lane is Lane.NEW_WORK)
        hidden = self.parts.prompts.run(rows, seqs, leave_room=plan.leave_room)
        wanted = [i for i, row in enumerate(rows) if row.sample is not None]
        if len(wanted) < len(rows):
            flags.append((rows, self.parts.results.flags(hidden)))
        if not wanted:
            return
        sampled = [rows[i] for i in wanted]
        if len(wanted) < len(rows):
            hidden = hidden[self.parts.upload({"wanted": np.array(wanted)})["wanted"]]
        results, tops = self.parts.prompt_sampler.run(sampled, [seqs[i] for i in wanted], hidden)
        outputs.append(self.parts.results.output(sampled, results, tops))

    def _warm_up(self) -> None:
        """Runs every kind of pass that is compiled or planned separately. The passes write to the spare page.

        The thread that launches steps calls this method, because some libraries keep their plans by thread.
        """
        self._warm = True
        if self._stream is None:
            return
        if self.parts.vision_graphs is None:
            self.vision.warm_up()
        self.parts.images.warm_up()
        if self.parts.refinement is not None:
            side, device = self._config.vision.crop_size, self.model.device
            for rows in range(1, MOST_REFINED + 1):
                crops = torch.zeros(rows, side, side, 3, dtype=torch.uint8, device=device)
                self.parts.refinement(crops, crops[..., 0])
        self.parts.prompts.warm_up()
        self.warm_up_samples()
        if not self._captured:
            self.parts.decode.warm_up()

    def warm_up_samples(self) -> None:
        """What follows a prefill pass: sampling for any number of prompts, and the check of prompts that continue."""
        rows, dim = self._limits.max_batch_size, self._config.text.dim
        hidden = torch.zeros(rows, dim, dtype=self.model.dtype, device=self.model.device)
        self.parts.prompt_sampler.warm_up(hidden)
        flag_rows(hidden, torch.empty(rows, 1, dtype=torch.int32, device=hidden.device))

    @torch.inference_mode()
    def _capture(self, progress: Progress | None) -> None:
        assert self._stream is not None
        self._kept_graphs.append(first_fork(self._stream))
        self.parts.lanes.warm_up()
        phases = {
            "decode": self.parts.decode.capture,
            "prefill": self.parts.prompts.capture,
            "sampling": self.parts.prompt_sampler.capture,
        }
        if self.parts.vision_graphs is not None:
            phases["vision"] = self.parts.vision_graphs.capture
        for name, capture in phases.items():
            began = clock.now()
            capture(progress)
            logger.info("graphs of %s: captured in %.2f s", name, clock.now() - began)
