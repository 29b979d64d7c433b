"""GpuRuntime: StepPlans through Triton kernels and captured decode passes.

A step is enqueued on one stream and nothing waits: one decode pass, then pictures, then prompts; the token that a
sequence sampled stays on the device for its next row. Owns the K/V pool, the pictures' embeddings and the state of
sequences; decides nothing. Runs on CPU tensors too when Triton interprets its kernels, without streams and graphs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import RuntimeFailure
from ...kernels.decode_io import COORD, PREVIOUS, SIZE, TEXT, SampledTokens, feed_rows
from ...model_config import ModelConfig
from ...models.moondream import Moondream
from ...requests import Coord, Size
from ...step import Previous, Row, RuntimeLimits, SampleSpec, StepPlan, StepResult
from ..kv_cache import KvCache
from ..lost_work import LostWork
from ..protocol import StepHandle
from ..sampler import sample
from .decode_attention import FlashInferRows
from .device import capabilities
from .graphs import DecodeGraphs, Progress, Variant, ladder
from .pictures import EncodedPictures
from .prefill import Prefill
from .prefill_attention import choose_attention
from .prefill_graphs import PrefillGraphs
from .rules import RuleEncoder, decode_results
from .sample_head import ROW_FIELDS, SampleHead
from .slots import SequenceSlots, TableUpdates
from .staging import Results, RowBuffers, Uploader
from .text import FusedText
from .vision import MAX_CROPS, FusedVision
from .vision_graphs import VisionGraphs
from .weights import pack_weights


@dataclass(frozen=True, slots=True, eq=False)
class PendingStep:
    """A step that was enqueued. ``outputs``: sampled rows with their results, good once ``marks`` have passed."""

    plan: StepPlan
    outputs: list[tuple[list[Row], Tensor]]
    marks: list[torch.cuda.Event | float]


class GpuRuntime:
    """Implements ``protocol.Runtime``. Takes ``tensors`` over, a complete checkpoint (canonical names without
    ``model.``) on one device, experts in FP8 or like the rest: they are packed, and their own entries become views."""

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
        cuda_graphs: bool = True,
        max_crops: int = MAX_CROPS,
        progress: Progress | None = None,
    ) -> None:
        """Captures the decode graphs on a CUDA device, unless told not to; ``progress`` hears of each."""
        assert max_seq_length <= config.text.max_context, (max_seq_length, config.text.max_context)
        pack_weights(config, tensors)
        self.model = model = Moondream(config, tensors)
        self._config = config
        self._limits = RuntimeLimits(
            num_pages=num_pages,
            page_size=page_size,
            max_batch_size=max_batch_size,
            max_seq_length=max_seq_length,
            vocab_size=config.text.vocab_size,
        )
        device = model.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # One page more than the scheduler knows of: padding rows write there.
        self._cache = KvCache(
            config.text,
            num_pages=num_pages + 1,
            page_size=page_size,
            dtype=model.dtype,
            device=device,
        )
        max_pages = -(-max_seq_length // page_size) + 1
        self._slots = SequenceSlots(2 * max_batch_size + 2, max_pages)
        self._spare = self._slots.capacity
        self._page_table = torch.full(
            (self._spare + 1, max_pages), num_pages, dtype=torch.int32, device=device
        )
        self._sampled = SampledTokens.empty(self._spare + 1, device)
        self._fed_values = [False] * (self._spare + 1)
        """Slots whose last sampled token may be a coordinate or a size."""
        self.attention = choose_attention(attention, device, model.dtype)
        early = device.type == "cuda" and capabilities(device).compute_capability == (9, 0)
        self._planned: FlashInferRows | None = None
        """Attention of decode steps where the host plans it before each."""
        if self.attention.decode is not None:
            self._planned = FlashInferRows(
                self.attention.decode, config.text, self._limits, max_pages, spare_page=num_pages
            )
        self.text = FusedText(
            config.text,
            tensors,
            max_rows=max_batch_size,
            page_size=page_size,
            pdl=early,
            attention=self._planned,
        )
        self.vision = FusedVision(config.vision, tensors)
        self._upload = Uploader(device)
        self._vision_graphs = None
        if self._stream is not None and cuda_graphs:
            self._vision_graphs = VisionGraphs(self.vision, self._stream, max_crops=max_crops)
        bos = model.text.wte[config.ids.bos_id]
        self._pictures = EncodedPictures(self.vision, self._vision_graphs, bos)
        spare_slot = num_pages * page_size
        graphs = None
        if self.attention.captures and (device.type != "cuda" or cuda_graphs):
            # Without a device the same passes run uncaptured: that is how they are tested there.
            graphs = PrefillGraphs(
                self.text,
                self._cache,
                self._page_table,
                block_length=config.image_prefix,
                max_rows=max_batch_size,
                spare_slot=spare_slot,
                flashinfer=self.attention.library,
                stream=self._stream,
            )
        self._prompts = Prefill(
            config,
            model,
            self.text,
            self._cache,
            self._pictures,
            self.attention,
            self._upload,
            graphs,
            spare_slot=spare_slot,
        )
        self._rules = RuleEncoder()
        self._decode_rows = RowBuffers(ROW_FIELDS, max_batch_size, device)
        self._prefill_rows = RowBuffers(ROW_FIELDS, max_batch_size, device)
        heads = [
            SampleHead(self.text, model.region, config, self._sampled, max_batch_size, device)
            for _ in range(2)
        ]
        self._decode_head, self._prefill_head = heads
        width = self._decode_head.results.shape[1]
        self._results = Results(max_batch_size, width, device)
        self._x = torch.zeros(max_batch_size, config.text.dim, dtype=model.dtype, device=device)
        self._normed = torch.empty_like(self._x)
        self._kinds = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._values = torch.zeros(max_batch_size, 2, dtype=torch.float32, device=device)
        self._lost = LostWork()
        self._pending: deque[PendingStep] = deque()
        self._closed = self._warm = False
        self._graphs = DecodeGraphs(self._decode_body, max_batch_size, stream=self._stream)
        self.capture_s = 0.0
        """Seconds that capturing graphs took, and compiling what was not compiled yet."""
        if self._stream is not None:
            # The weights came by other streams.
            torch.cuda.synchronize(device)
            if cuda_graphs:
                began = time.monotonic()
                self._capture(progress)
                self.capture_s = time.monotonic() - began

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises AssertionError for a wrong plan, and torch's own errors; its rows are lost then."""
        assert not self._closed, "the runtime is closed"
        plan = self._lost.without(plan)
        try:
            with self._on_stream():
                if not self._warm:
                    self._warm_up()
                handle = self._enqueue(plan)
        except BaseException:
            self._lost.note(plan)
            raise
        self._pending.append(handle)
        return handle

    def collect(self, handle: StepHandle) -> StepResult:
        """Raises RuntimeFailure for non-finite logits, and torch's own errors."""
        assert isinstance(handle, PendingStep), handle
        assert self._pending and self._pending[0] is handle, "steps are collected as launched"
        self._pending.popleft()
        tokens = {}
        try:
            last = handle.marks[-1]
            if isinstance(last, torch.cuda.Event):
                last.synchronize()
            for rows, results in handle.outputs:
                specs = [_spec(row) for row in rows]
                for row, token in zip(
                    rows, decode_results(results, specs, self._config), strict=True
                ):
                    tokens[row.sequence_id] = token
        except BaseException:
            self._lost.note(handle.plan)
            raise
        decode_s, vision_s, prefill_s = _seconds(handle.marks)
        return StepResult(tokens=tokens, vision_s=vision_s, prefill_s=prefill_s, decode_s=decode_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._stream is not None:
            self._stream.synchronize()
        self._graphs.clear()
        self._pending.clear()
        if self._vision_graphs is not None:
            self._vision_graphs.clear()
        self._prompts.close()
        self._pictures.clear()
        del self._cache

    @torch.inference_mode()
    def hidden(self, rows: Sequence[Row]) -> Tensor:
        """One prefill pass without sampling: stores keys and values and returns [num_rows, dim], the residual stream
        before ``post_ln`` at each row's last position."""
        with self._on_stream():
            for row in rows:
                self._check(row)
            return self._prompts.run(rows, None)

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
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _enqueue(self, plan: StepPlan) -> PendingStep:
        self._pictures.drop(plan.drop_images)
        for sequence_id in plan.ended:
            self._slots.release(sequence_id)
        assert len(plan.decode) <= self._limits.max_batch_size, len(plan.decode)
        outputs = []
        marks = [self._mark()]
        # Decode goes first: rows of a step don't depend on one another, and while it runs the host gets pictures ready.
        if plan.decode:
            outputs.append(self._decode(plan.decode, plan.step_id))
        marks.append(self._mark())
        self._pictures.encode(plan.encode)
        marks.append(self._mark())
        for rows in self._prompts.passes(plan.prefill):
            output = self._prefill(rows, plan.step_id)
            if output is not None:
                outputs.append(output)
        marks.append(self._mark())
        return PendingStep(plan, outputs, marks)

    # Prompts.

    def _prefill(self, rows: Sequence[Row], step_id: int) -> tuple[list[Row], Tensor] | None:
        for row in rows:
            self._check(row)
        seqs = self._place(rows, step_id)
        hidden = self._prompts.run(rows, seqs)
        wanted = [i for i, row in enumerate(rows) if row.sample is not None]
        if not wanted:
            return None
        sampled = [rows[i] for i in wanted]
        if len(wanted) < len(rows):
            hidden = hidden[self._upload({"wanted": np.array(wanted)})["wanted"]]
        host = self._prefill_rows.host()
        host["seqs"][: len(sampled)] = [seqs[i] for i in wanted]
        variant, odd = self._encode_rules(sampled, host, len(sampled), spatial=False)
        self._prefill_rows.send()
        self._sample(self._prefill_head, hidden, self._prefill_rows, variant, odd)
        return sampled, self._results.fetch(self._prefill_head.results[: len(sampled)])

    def _check(self, row: Row) -> None:
        limits = self._limits
        assert len(row.page_table) <= self._slots.max_pages, (
            f"sequence {row.sequence_id}: {len(row.page_table)} pages, limit {self._slots.max_pages}"
        )
        assert (
            row.page_table and 0 <= min(row.page_table) <= max(row.page_table) < limits.num_pages
        ), f"sequence {row.sequence_id}: pages outside 0..{limits.num_pages - 1}"

    # Decode.

    def _decode(self, rows: Sequence[Row], step_id: int) -> tuple[list[Row], Tensor]:
        count = len(rows)
        padded = self._graphs.padded(count)
        host = self._decode_rows.host()
        host["seqs"][:count] = self._place(rows, step_id)
        spatial = self._fill_inputs(rows, host)
        host["seqs"][count:padded] = self._spare
        host["positions"][count:padded] = 0
        host["kinds"][count:padded] = TEXT
        host["ids"][count:padded] = 0
        variant, odd = self._encode_rules(rows, host, padded, spatial=spatial)
        self._decode_rows.send()
        if self._planned is not None:
            self._planned.plan(padded, rows)
        if odd:
            hidden = self._decode_hidden(variant)
            self._sample(self._decode_head, hidden, self._decode_rows, variant, odd)
        else:
            self._graphs.run(variant)
        return list(rows), self._results.fetch(self._decode_head.results[:count])

    def _place(self, rows: Sequence[Row], step_id: int) -> list[int]:
        """Each row's slot. Brings the device's page tables up to date."""
        updates = TableUpdates()
        slots = [self._slots.place(row, step_id, updates) for row in rows]
        if updates.indices:
            there = self._upload(
                {
                    "indices": np.array(updates.indices, dtype=np.int64),
                    "pages": np.array(updates.pages, dtype=np.int32),
                }
            )
            self._page_table.view(-1).index_copy_(0, there["indices"], there["pages"])
        return slots

    def _fill_inputs(self, rows: Sequence[Row], host: dict[str, np.ndarray]) -> bool:
        """What each decode row is fed, and where; True if any of it may be a coordinate or a size."""
        kinds, ids, positions = [], [], []
        spatial = False
        seqs = host["seqs"].tolist()
        for index, row in enumerate(rows):
            assert len(row.tokens) == 1, f"{len(row.tokens)} tokens in a decode row"
            token = row.tokens[0]
            positions.append(row.start)
            if isinstance(token, Previous):
                kinds.append(PREVIOUS)
                ids.append(0)
                spatial = spatial or self._fed_values[seqs[index]]
            elif isinstance(token, int):
                kinds.append(TEXT)
                ids.append(token)
            elif isinstance(token, Coord):
                kinds.append(COORD)
                ids.append(0)
                host["values"][index, 0] = token.value
                spatial = True
            else:
                assert isinstance(token, Size), f"sequence {row.sequence_id}: {token} in decode"
                kinds.append(SIZE)
                ids.append(0)
                host["values"][index] = token.width, token.height
                spatial = True
        count = len(rows)
        host["kinds"][:count] = kinds
        host["ids"][:count] = ids
        host["positions"][:count] = positions
        return spatial

    def _encode_rules(
        self, rows: Sequence[Row], host: dict[str, np.ndarray], padded: int, *, spatial: bool
    ) -> tuple[Variant, list[int]]:
        """Fills the rule fields of ``padded`` rows. Also returns the rows whose rules have no room there."""
        specs = [_spec(row) for row in rows]
        odd = self._rules.encode(specs, host, padded)
        greedy = True
        seqs = host["seqs"].tolist()
        for index, spec in enumerate(specs):
            reads = spec.rule.read_coord or spec.rule.read_size
            self._fed_values[seqs[index]] = reads
            spatial = spatial or reads
            greedy = greedy and spec.sampling.temperature == 0
        return Variant(padded, greedy, spatial), odd

    def _decode_body(self, variant: Variant) -> None:
        """One whole decode pass over the fixed buffers: what a graph captures."""
        hidden = self._decode_hidden(variant)
        self._decode_head(
            hidden, self._decode_rows.device, variant, normed=self._normed[: variant.num_rows]
        )

    def _decode_hidden(self, variant: Variant) -> Tensor:
        n, rows = variant.num_rows, self._decode_rows.device
        x, kinds, values = self._x[:n], self._kinds[:n], self._values[:n]
        feed_rows(
            rows["seqs"][:n],
            rows["kinds"][:n],
            rows["ids"][:n],
            rows["values"][:n],
            self._sampled,
            self.model.text.wte,
            x=x,
            kinds_out=kinds,
            values_out=values,
        )
        if variant.spatial:
            region = self.model.region
            coords, sizes = region.embed_coords(values[:, 0]), region.embed_sizes(values)
            kind = kinds[:, None]
            x = torch.where(kind == COORD, coords, torch.where(kind == SIZE, sizes, x))
        return self.text.decode(
            x,
            rows["positions"][:n],
            rows["seqs"][:n],
            self._page_table,
            self._cache.keys,
            self._cache.values,
            normed=self._normed[:n],
        )

    def _sample(
        self,
        head: SampleHead,
        hidden: Tensor,
        buffers: RowBuffers,
        variant: Variant,
        odd: list[int],
    ) -> None:
        """As the head's own call; rows in ``odd`` are drawn by the reference sampler, for which the host waits."""
        if not odd:
            head(hidden, buffers.device, variant)
            return
        logits = self.text.logits(hidden)
        head.sample(logits, buffers.device, variant)
        specs = self._rules.odd
        drawn = sample(logits[odd].float(), [specs[i] for i in odd])
        for row, (token, logprob) in zip(odd, drawn, strict=True):
            head.replace(row, token, logprob)
        head.keep(hidden, buffers.device, variant)

    def _warm_up(self) -> None:
        """Runs passes of the kinds that are compiled or planned apart, in the thread that launches: some libraries
        keep their plans by thread. What they write lies in the page that nobody reads."""
        self._warm = True
        if self._stream is None:
            return
        if self._vision_graphs is None:
            self.vision.warm_up()
        self._prompts.warm_up()

    def _capture(self, progress: Progress | None) -> None:
        """Rows of the spare sequence, forced to id 0, stand in while graphs are made."""
        limits = self._limits
        host = self._decode_rows.host()
        host["seqs"][:] = self._spare
        self._rules.encode([], host, limits.max_batch_size)
        self._decode_rows.send()
        with torch.inference_mode():
            if self._planned is not None:
                with torch.cuda.stream(self._stream):
                    for padded in ladder(limits.max_batch_size):
                        self._planned.plan(padded, ())
            self._graphs.capture(progress)
            self._prompts.capture(progress)
            if self._vision_graphs is not None:
                self._vision_graphs.capture(progress)


def _spec(row: Row) -> SampleSpec:
    assert row.sample is not None, f"sequence {row.sequence_id}: a decode row samples"
    return row.sample


def _seconds(marks: list[torch.cuda.Event | float]) -> list[float]:
    """Between each two."""
    spans = []
    for before, after in itertools.pairwise(marks):
        if isinstance(before, torch.cuda.Event):
            assert isinstance(after, torch.cuda.Event)
            spans.append(before.elapsed_time(after) / 1000)
        else:
            assert isinstance(after, float)
            spans.append(after - before)
    return spans


def _failed(rows: Sequence[Row], bad: np.ndarray) -> RuntimeFailure:
    places = np.flatnonzero(bad).tolist()
    return RuntimeFailure(f"non-finite logits in rows {places} of {len(rows)}")
