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
from ...models.kv_format import Scales
from ...models.moondream import Moondream
from ...models.refiner import Refiner
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
from ..kv_cache import KvCache, kv_dtype
from ..lost_work import LostWork
from ..out_of_memory import raise_as_memory_error
from ..protocol import StepHandle
from ..refinement import Refinement, arrays_of
from .adapters.layout import SlabLayout
from .adapters.pass_slabs import PassSlabs, new_anchor
from .attention.decode import FlashInferRows
from .attention.prefill import choose_attention
from .capture import first_fork
from .decode import Decode
from .device import capabilities
from .footprint import FP8_DECODE, FP8_PREFILL, FP8_VISION
from .lanes import Lanes
from .prefill.graphs import PrefillGraphs
from .prefill.prefill import Prefill
from .room import can_leave_room
from .sampling.prompts import PromptSampler
from .sampling.rows import RowSampler
from .state.sequence_state import SequenceState
from .state.staging import Uploader
from .step_results import PassOutput, PendingStep, StepResults
from .streams import record
from .text.decoder import FusedText
from .vision.graphs import VisionGraphs
from .vision.images import EncodedImages
from .vision.tower import MAX_CROPS, FusedVision
from .weights import pack_weights

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
        *,
        num_pages: int,
        page_size: int,
        max_batch_size: int,
        max_seq_length: int,
        attention: str = "auto",
        fp8_gemms: str = "off",
        cuda_graphs: bool = True,
        max_crops: int = MAX_CROPS,
        kv_scales: Sequence[Scales] | None = None,
        decode_beside: bool = True,
        refiner: Refiner | None = None,
        device_images: int = 64,
        host_images: int = 0,
        adapters: SlabLayout | None = None,
        adapt_vision: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Captures the graphs on a CUDA device, unless ``cuda_graphs`` is False, and calls ``progress`` for each.

        ``attention``, ``fp8_gemms`` and ``decode_beside``: as in RuntimeConfig. ``kv_scales``: the scales of each layer
        for an FP8 KV cache; None for a KV cache in the model's dtype. ``device_images``, ``host_images``: prefixes of
        images that stay on the device, and places for more in the host's memory. ``adapters``: the layout of adapters'
        slabs; None if rows have no adapters, which needs fewer graphs. ``adapt_vision``: adapters may change the vision
        tower and the projector, which needs more graphs. Raises ConfigError for an attention library or an FP8 setting
        that is not available, and torch's own errors.
        """
        assert max_seq_length <= config.text.max_context, (max_seq_length, config.text.max_context)
        pack_weights(config, tensors)
        self.model = model = Moondream(config, tensors)
        self._config = config
        device = model.device
        self.attention = choose_attention(
            attention, device, model.dtype, kv_dtype(model.dtype, kv_scales)
        )
        # FlashInfer's prefill and decode share a workspace. Without graphs, the host launches too slowly for two lanes.
        can_decode_beside = device.type == "cuda" and cuda_graphs and self.attention.decode is None
        decode_beside = decode_beside and can_decode_beside
        self._limits = limits = RuntimeLimits(
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_seq_length=max_seq_length,
            vocab_size=config.text.vocab_size,
            decodes_beside=decode_beside,
            leaves_room=decode_beside and can_leave_room(device, model.dtype),
            refines=refiner is not None,
            host_images=host_images,
        )
        self._refinement = None if refiner is None else Refinement(model.vision, refiner)
        self._layout = adapters
        self._lanes = Lanes(device, two=limits.decodes_beside)
        self._stream = self._lanes.stream
        # One page more than the scheduler uses: rows of padding write to it.
        self._cache = KvCache(
            config.text,
            num_pages=num_pages + 1,
            page_size=page_size,
            dtype=model.dtype,
            device=device,
            scales=kv_scales,
        )
        self._upload = Uploader(device)
        self._state = state = SequenceState(limits, device, self._upload)
        planned = None
        if self.attention.decode is not None:
            planned = FlashInferRows(
                self.attention.decode, config.text, limits, state.max_pages, spare_page=num_pages
            )
        self.text = FusedText(
            config.text,
            tensors,
            max_rows=max_batch_size,
            page_size=page_size,
            pdl=device.type == "cuda" and capabilities(device).compute_capability == (9, 0),
            attention=planned,
            fp8=fp8_gemms in FP8_PREFILL,
            fp8_decode=fp8_gemms in FP8_DECODE,
            kv_scales=kv_scales,
            decode_priority=self._lanes.decode_priority,
            adapters=adapters,
        )
        self._anchor = None if adapters is None else new_anchor(model.dtype, device)
        decode_slabs = None
        if self._anchor is not None:
            decode_slabs = PassSlabs(self._anchor, max_batch_size, max_batch_size, device)
        self.vision = FusedVision(
            config.vision,
            tensors,
            fp8=fp8_gemms in FP8_VISION,
            adapters=(adapters, self._anchor)
            if adapt_vision and adapters is not None and self._anchor is not None
            else None,
        )
        self._vision_graphs = None
        if self._stream is not None and cuda_graphs:
            self._vision_graphs = VisionGraphs(
                self.vision, self._stream, max_crops=max_crops, with_room=limits.leaves_room
            )
        bos = model.text.wte[config.ids.bos_id]
        self._images = EncodedImages(
            self.vision,
            self._vision_graphs,
            bos,
            self._upload,
            on_device=device_images,
            on_host=host_images,
        )
        self._prompts = Prefill(
            config,
            model,
            self.text,
            self._cache,
            self._images,
            self.attention,
            self._upload,
            self._prefill_graphs(captured=cuda_graphs),
            spare_slot=num_pages * page_size,
            anchor=self._anchor,
        )
        samplers = [
            RowSampler(config, model, self.text, state, max_batch_size, device) for _ in range(2)
        ]
        decode_sampler, prompt_sampler = samplers
        self._prompt_sampler = PromptSampler(
            prompt_sampler, state, self._prompts.fixed_hidden, stream=self._stream
        )
        self._decode = Decode(
            model,
            self.text,
            self._cache,
            state,
            decode_sampler,
            max_batch_size,
            planned=planned,
            slabs=decode_slabs,
            stream=self._lanes.decode_stream,
        )
        self._results = StepResults(config, max_batch_size, device)
        self._lost = LostWork()
        self._pending: dict[Lane, deque[PendingStep]] = {lane: deque() for lane in Lane}
        self._closed = self._warm = False
        self._captured = self._stream is not None and cuda_graphs
        self._kept_graphs: list[torch.cuda.CUDAGraph] = []
        self.capture_s = 0.0
        """Seconds for capturing the graphs, including the compilation of missing kernels."""
        if self._stream is not None:
            # Other streams loaded the weights.
            torch.cuda.synchronize(device)
            if self._captured:
                began = clock.now()
                self._capture(progress)
                self.capture_s = clock.now() - began

    def _prefill_graphs(self, *, captured: bool) -> PrefillGraphs | None:
        """Returns the captured passes, if they are used. On a CPU, the same passes run without capture, for tests."""
        if not self.attention.captures or not (captured or self._stream is None):
            return None
        limits = self._limits
        return PrefillGraphs(
            self.text,
            self._cache,
            self._state.page_table,
            block_length=self._config.image_prefix,
            max_rows=limits.max_batch_size,
            spare_slot=limits.num_pages * limits.page_size,
            blocks=self.attention.own_blocks,
            stream=self._stream,
            anchor=self._anchor,
            with_room=limits.leaves_room,
        )

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
                self._lanes.synchronize()
            with torch.inference_mode(), self._lanes.of(plan):
                handle = self._enqueue(plan)
        except BaseException as error:
            self._lost.note(plan)
            self._state.unhold(plan.step_id)
            # A part of the step may run. Its pages will be free, and the other lane may write to them.
            with contextlib.suppress(Exception):
                self._lanes.synchronize()
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
        self._state.unhold(handle.plan.step_id)
        try:
            return self._results.read(handle)
        except BaseException as error:
            self._lost.note(handle.plan)
            raise_as_memory_error(error)
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lanes.synchronize()
        self._decode.close()
        for pending in self._pending.values():
            pending.clear()
        if self._vision_graphs is not None:
            self._vision_graphs.clear()
        self._prompts.close()
        self._prompt_sampler.close()
        self._images.clear()
        self._kept_graphs.clear()
        # A caller may keep the engine, and with it this object, for long. What holds device memory goes now.
        del self.model, self.text, self.vision, self._cache, self._state, self._upload
        del self._images, self._prompts, self._prompt_sampler, self._decode, self._results
        del self._vision_graphs, self._refinement, self._anchor
        # The streams go to the next model, which then needs no further workspaces of cuBLAS.
        del self._lanes, self._stream

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """Runs one prefill pass without sampling, and stores its keys and values.

        Returns [num_rows, dim], the residual stream before ``post_ln`` at each row's last position.
        """
        with self._on_stream():
            for row in rows:
                self._state.check(row)
            found = self._prompts.run(rows, None)
        if self._stream is not None:
            # The caller reads the result on another stream.
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        return found

    @torch.inference_mode()
    def encode_crops(self, crops: Tensor) -> Tensor:
        """As `FusedVision.encode_crops`, with the captured passes of steps, on the current stream.

        No step may be in flight.
        """
        return self._images.encode_crops(crops)

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
        self._images.drop(plan.drop_images, plan.drop_crops)
        for sequence_id in plan.ended:
            self._state.release(sequence_id)
        outputs: list[PassOutput] = []
        flags: list[tuple[Sequence[Row], Tensor]] = []
        groups: tuple[int, ...] = ()
        marks = [self._mark()]
        # The rows of a step don't depend on one another. Decode goes first, so the host prepares images while it runs.
        if plan.decode:
            sampled, tops = self._decode.run(plan.decode, plan.step_id)
            outputs.append(self._results.output(plan.decode, sampled, tops))
            groups = self._decode.shared_groups
        # A part without work ends where the part before it does.
        marks.append(self._mark() if plan.decode else marks[-1])
        self._images.encode(plan.encode, leave_room=plan.leave_room)
        readings = {read.sequence_id: self._images.reading(read) for read in plan.reads}
        refined = self._refine(plan.refine) if plan.refine else None
        looks = plan.encode or plan.reads or plan.refine
        marks.append(self._mark() if looks else marks[-1])
        for rows in self._prompts.passes(plan.prefill):
            self._prefill(rows, plan, outputs, flags)
        marks.append(self._mark() if plan.prefill else marks[-1])
        self._lanes.enqueued(plan, marks[-1])
        return PendingStep(plan, readings, outputs, groups, flags, refined, marks)

    def _refine(self, rows: Sequence[RefineRow]) -> Tensor:
        """Enqueues the refinement of masks, and the copy of the results to the host."""
        assert self._refinement is not None, "this runtime has no refiner"
        pixels, masks = arrays_of(rows)
        sent = self._upload({"pixels": pixels, "masks": masks})
        adapters = {id(row.adapter): row.adapter for row in rows}
        changes = {
            key: None if adapter is None or self._layout is None else self._layout.unpacked(adapter)
            for key, adapter in adapters.items()
        }
        refined = self._refinement(
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
            self._state.check(row)
        seqs = self._state.assign(rows, plan.step_id, hold=plan.lane is Lane.NEW_WORK)
        hidden = self._prompts.run(rows, seqs, leave_room=plan.leave_room)
        wanted = [i for i, row in enumerate(rows) if row.sample is not None]
        if len(wanted) < len(rows):
            flags.append((rows, self._results.flags(hidden)))
        if not wanted:
            return
        sampled = [rows[i] for i in wanted]
        if len(wanted) < len(rows):
            hidden = hidden[self._upload({"wanted": np.array(wanted)})["wanted"]]
        results, tops = self._prompt_sampler.run(sampled, [seqs[i] for i in wanted], hidden)
        outputs.append(self._results.output(sampled, results, tops))

    def _warm_up(self) -> None:
        """Runs every kind of pass that is compiled or planned separately. The passes write to the spare page.

        The thread that launches steps calls this method, because some libraries keep their plans by thread.
        """
        self._warm = True
        if self._stream is None:
            return
        if self._vision_graphs is None:
            self.vision.warm_up()
        self._images.warm_up()
        if self._refinement is not None:
            side, device = self._config.vision.crop_size, self.model.device
            for rows in range(1, MOST_REFINED + 1):
                crops = torch.zeros(rows, side, side, 3, dtype=torch.uint8, device=device)
                self._refinement(crops, crops[..., 0])
        self._prompts.warm_up()
        self._warm_up_samples()
        if not self._captured:
            self._decode.warm_up()

    def _warm_up_samples(self) -> None:
        """What follows a prefill pass: sampling for any number of prompts, and the check of prompts that continue."""
        rows, dim = self._limits.max_batch_size, self._config.text.dim
        hidden = torch.zeros(rows, dim, dtype=self.model.dtype, device=self.model.device)
        self._prompt_sampler.warm_up(hidden)
        flag_rows(hidden, torch.empty(rows, 1, dtype=torch.int32, device=hidden.device))

    @torch.inference_mode()
    def _capture(self, progress: Progress | None) -> None:
        assert self._stream is not None
        self._kept_graphs.append(first_fork(self._stream))
        self._lanes.warm_up()
        phases = {
            "decode": self._decode.capture,
            "prefill": self._prompts.capture,
            "sampling": self._prompt_sampler.capture,
        }
        if self._vision_graphs is not None:
            phases["vision"] = self._vision_graphs.capture
        for name, capture in phases.items():
            began = clock.now()
            capture(progress)
            logger.info("graphs of %s: captured in %.2f s", name, clock.now() - began)
