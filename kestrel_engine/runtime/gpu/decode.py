"""Decode: runs decode passes, which take the last token of each sequence and sample the next one.

It owns the fixed buffers of the captured passes. A batch is padded with rows of the spare sequence to the next captured
batch size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...kernels.decode_io import COORD, PREVIOUS, SIZE, TEXT, feed_rows
from ...models.moondream import Moondream
from ...types.progress import Progress
from ...types.requests import Coord, Size
from ...types.step import Previous, Row
from ..kv_cache import KvCache
from .adapters.pass_slabs import PassSlabs, changing_attention
from .attention.decode import FlashInferRows
from .graphs import PassGraphs, RowAdapters, Variant, ladder
from .sampling.rows import RowSampler
from .state.sequence_state import SequenceState
from .state.shared_rows import FEWEST_ROWS, SharedRows
from .text.decoder import FusedText


class Decode:
    """The decode passes of a runtime. ``planned``: FlashInfer's attention, which the host plans before each pass; None
    for our own kernel. ``slabs``: those of the rows; None if rows have no adapters. ``stream``: None on a CPU."""

    def __init__(
        self,
        model: Moondream,
        text: FusedText,
        cache: KvCache,
        state: SequenceState,
        sampler: RowSampler,
        max_rows: int,
        *,
        planned: FlashInferRows | None,
        slabs: PassSlabs | None = None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._model, self._text, self._cache, self._state = model, text, cache, state
        self._sampler, self._max_rows = sampler, max_rows
        self._planned, self._stream, self._slabs = planned, stream, slabs
        device, dim = model.device, text.config.dim
        self._x = torch.zeros(max_rows, dim, dtype=model.dtype, device=device)
        self._normed = torch.empty_like(self._x)
        self._kinds = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._values = torch.zeros(max_rows, 2, dtype=torch.float32, device=device)
        config = text.config
        self.shared_groups: tuple[int, ...] = ()
        """Those of the last run, as in StepResult."""
        self._shared: SharedRows | None = None
        if planned is None and max_rows >= FEWEST_ROWS:
            self._shared = SharedRows(
                max_rows, config.n_heads, config.head_dim, cache.page_size, device
            )
        self.graphs = PassGraphs(
            "decode",
            self.body,
            max_rows,
            stream=stream,
            fewest_shared=None if self._shared is None else FEWEST_ROWS,
            adapters=slabs is not None,
        )

    def run(self, rows: Sequence[Row], step_id: int) -> tuple[Tensor, Tensor | None]:
        """Runs one pass over ``rows`` and returns the results on the device: [len(rows), RESULT_WIDTH] int32, and the
        likeliest ids as `RowSampler.tops` does.

        The results are valid until the next run.
        """
        count = len(rows)
        assert count <= self._max_rows, f"{count} decode rows, limit {self._max_rows}"
        self.shared_groups = () if self._shared is None else self._shared.send(rows)
        shared = bool(self.shared_groups)
        padded = self.graphs.padded(count, shared=shared)
        host = self._sampler.rows.host()
        host["new_pages"][:padded] = -1
        host["seqs"][:count] = self._state.assign_decoding(rows, step_id, host["new_pages"])
        spatial = self._fill_inputs(rows, host)
        host["seqs"][count:padded] = self._state.spare
        host["positions"][count:padded] = 0
        host["kinds"][count:padded] = TEXT
        host["ids"][count:padded] = 0
        variant = self._sampler.encode(rows, host, padded, spatial=spatial)
        variant = variant._replace(shared=shared, adapters=self._send_adapters(rows, padded))
        self._sampler.rows.send()
        if self._planned is not None:
            self._planned.plan(padded, rows)
        self.graphs.run(variant)
        self._sampler.redraw(self._x[:padded], variant)
        return self._sampler.head.results[:count], self._sampler.tops(count)

    def capture(self, progress: Progress | None) -> None:
        """Captures all graphs, with rows of the spare sequence as input. Requires a CUDA device."""
        self._send_padding()
        if self._planned is not None:
            with torch.cuda.stream(self._stream):
                for padded in ladder(self._max_rows):
                    self._planned.plan(padded, ())
        self.graphs.capture(progress)

    def warm_up(self) -> None:
        """Runs every variant of a pass uncaptured, on rows of the spare sequence: for a runtime without graphs."""
        self._send_padding()
        if self._planned is not None:
            for padded in ladder(self._max_rows):
                self._planned.plan(padded, ())
        self.graphs.warm_up()

    def close(self) -> None:
        self.graphs.clear()

    def _send_padding(self) -> None:
        self._sampler.send_padding(self._max_rows)
        if self._shared is not None:
            self._shared.send_nothing()
        if self._slabs is not None:
            self._slabs.send((), self._max_rows)

    def _send_adapters(self, rows: Sequence[Row], padded: int) -> RowAdapters:
        """Returns what the adapters of the rows change. If there are any, enqueues the copy of where they are."""
        adapters = [row.adapter for row in rows]
        if not any(adapters):
            return RowAdapters.NONE
        assert self._slabs is not None, "this runtime computes no adapters"
        self._slabs.send(adapters, padded)
        return RowAdapters.ALL if changing_attention(adapters) else RowAdapters.MLPS

    def _fill_inputs(self, rows: Sequence[Row], host: dict[str, np.ndarray]) -> bool:
        """Writes each row's input token and position. Returns True if an input may be a coordinate or a size."""
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
                spatial = spatial or self._state.may_hold_value(seqs[index])
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

    def body(self, variant: Variant) -> None:
        """Enqueues one complete pass over the fixed buffers, which a graph captures."""
        hidden = self._hidden(variant)
        self._sampler.head(
            hidden, self._sampler.rows.device, variant, normed=self._normed[: variant.num_rows]
        )

    def _hidden(self, variant: Variant) -> Tensor:
        n, rows = variant.num_rows, self._sampler.rows.device
        adapters = None
        if variant.adapters:
            assert self._slabs is not None
            adapters = self._slabs.of(n, attention=variant.adapters is RowAdapters.ALL)
        x, kinds, values = self._x[:n], self._kinds[:n], self._values[:n]
        feed_rows(
            rows["seqs"][:n],
            rows["kinds"][:n],
            rows["ids"][:n],
            rows["values"][:n],
            self._state.sampled,
            self._model.text.wte,
            rows["new_pages"][:n],
            self._state.page_table,
            x=x,
            kinds_out=kinds,
            values_out=values,
        )
        if variant.spatial:
            region = self._model.region
            coords, sizes = region.embed_coords(values[:, 0]), region.embed_sizes(values)
            kind = kinds[:, None]
            # In place, because `redraw` reads the stream from the same buffer after a captured pass.
            torch.where(kind == COORD, coords, torch.where(kind == SIZE, sizes, x), out=x)
        return self._text.decode(
            x,
            rows["positions"][:n],
            rows["seqs"][:n],
            self._state.page_table,
            self._cache.keys,
            self._cache.values,
            normed=self._normed[:n],
            shared=self._shared.of(n) if self._shared is not None and variant.shared else None,
            adapters=adapters,
        )
