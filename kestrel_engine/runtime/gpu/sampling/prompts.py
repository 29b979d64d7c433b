"""PromptSampler: samples the first tokens of sequences, after a prefill pass.

Sampling a few rows takes the device 0.1 ms, and the host longer than that to launch its kernels. So it is captured for
the fixed buffer in which captured prefill passes leave their results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....types.progress import Progress
from ....types.step import Row
from ..graphs import PassGraphs, Variant
from ..state.sequence_state import SequenceState
from .rows import RowSampler

CAPTURED_ROWS = 16
"""The most rows for which sampling is captured. The pass before more rows takes longer than the launches."""


class PromptSampler:
    """Owns the graphs of sampling after prefill. ``hidden``: [max_rows, dim], the fixed results of captured prefill
    passes; None if no pass is captured. ``stream``: None on a CPU."""

    def __init__(
        self,
        sampler: RowSampler,
        state: SequenceState,
        hidden: Tensor | None,
        *,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._sampler, self._state, self._hidden, self._stream = sampler, state, hidden, stream
        self._graphs: PassGraphs | None = None
        if hidden is not None:
            most = min(CAPTURED_ROWS, len(hidden))
            self._graphs = PassGraphs("sampling", self._body, most, stream=stream)

    def run(
        self, rows: Sequence[Row], seqs: Sequence[int], hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Samples a token for each row. Returns the results on the device: [len(rows), RESULT_WIDTH] int32, and the
        likeliest ids as `RowSampler.tops` does.

        ``seqs``: the rows' indices of sequences. ``hidden``: [len(rows), dim], the residual stream before ``post_ln``.
        The results are valid until the next run.
        """
        count, sampler = len(rows), self._sampler
        graphs = self._graphs_for(hidden)
        padded = count if graphs is None else graphs.padded(count)
        host = sampler.rows.host()
        host["seqs"][:count] = seqs
        host["seqs"][count:padded] = self._state.spare
        variant = sampler.encode(rows, host, padded, spatial=False)
        sampler.rows.send()
        if graphs is None or self._hidden is None:
            sampler(hidden, variant)
        else:
            graphs.run(variant)
            sampler.redraw(self._hidden[:padded], variant)
        return sampler.head.results[:count], sampler.tops(count)

    def capture(self, progress: Progress | None) -> None:
        """Captures all graphs, if there are any. Requires a CUDA device."""
        if self._graphs is not None:
            with torch.cuda.stream(self._stream):
                self._sampler.send_padding(min(CAPTURED_ROWS, self._max_rows))
            self._graphs.capture(progress)

    def warm_up(self, hidden: Tensor) -> None:
        self._sampler.warm_up(hidden)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    @property
    def _max_rows(self) -> int:
        return 0 if self._hidden is None else len(self._hidden)

    def _graphs_for(self, hidden: Tensor) -> PassGraphs | None:
        """Returns the graphs if they read ``hidden``: few rows, at the beginning of the fixed buffer."""
        fixed = self._hidden
        if fixed is None or len(hidden) > CAPTURED_ROWS or hidden.data_ptr() != fixed.data_ptr():
            return None
        return self._graphs

    def _body(self, variant: Variant) -> None:
        assert self._hidden is not None
        rows = self._sampler.rows.device
        self._sampler.head(self._hidden[: variant.num_rows], rows, variant)
