"""RowSampler: the rows of one kind of pass, from their rules to their sampled tokens.

Decode has one and prefill has one, since their passes keep fixed buffers. Rules that have no room in the kernel's
numbers are drawn by the reference sampler, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....models.moondream import Moondream
from ....types.model_config import ModelConfig
from ....types.step import Row, SampleSpec
from ...sampler import sample
from ..graphs import Variant
from ..state.sequence_state import SequenceState
from ..state.staging import RowBuffers
from ..text.decoder import FusedText
from .head import ROW_FIELDS, SampleHead
from .rules import RuleEncoder


class RowSampler:
    """``rows``: what the host tells of up to ``max_rows`` rows; the caller fills ``seqs`` and sends them."""

    def __init__(
        self,
        config: ModelConfig,
        model: Moondream,
        text: FusedText,
        state: SequenceState,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._text, self._state = text, state
        self.rows = RowBuffers(ROW_FIELDS, max_rows, device)
        self.head = SampleHead(text, model.region, config, state.sampled, max_rows, device)
        self._rules = RuleEncoder()
        self._odd: list[int] = []

    @property
    def has_odd(self) -> bool:
        """Whether a row of the last encode() has a rule without room in the kernel's numbers."""
        return bool(self._odd)

    def encode(
        self, rows: Sequence[Row], host: dict[str, np.ndarray], padded: int, *, spatial: bool
    ) -> Variant:
        """Fills the rule fields of ``padded`` rows of ``host`` (from ``rows.host()``), the first of which have ``seqs``
        already. ``spatial``: what they are fed may be a value."""
        specs = [spec_of(row) for row in rows]
        self._odd = self._rules.encode(specs, host, padded)
        reads = self._state.note_rules(host["seqs"][: len(rows)].tolist(), specs)
        greedy = all(spec.sampling.temperature == 0 for spec in specs)
        return Variant(padded, greedy, spatial or reads)

    def send_padding(self, padded: int) -> None:
        """Rows of the spare sequence, fed and forced to id 0."""
        host = self.rows.host()
        for name in ("positions", "kinds", "ids"):
            host[name][:padded] = 0
        host["seqs"][:padded] = self._state.spare
        host["new_pages"][:padded] = -1
        self._odd = self._rules.encode([], host, padded)
        self.rows.send()

    def __call__(self, hidden: Tensor, variant: Variant) -> None:
        """``hidden`` [num_rows, dim], before ``post_ln``; fills ``head.results``."""
        if not self._odd:
            self.head(hidden, self.rows.device, variant)
            return
        logits = self._text.logits(hidden)
        self.head.sample(logits, self.rows.device, variant)
        drawn = sample(logits[self._odd].float(), [self._rules.odd[row] for row in self._odd])
        for row, found in zip(self._odd, drawn, strict=True):
            if found is not None:  # The kernel has flagged the others, too.
                self.head.replace(row, *found)
        self.head.keep(hidden, self.rows.device, variant)


def spec_of(row: Row) -> SampleSpec:
    """What a row that samples samples by."""
    assert row.sample is not None, f"sequence {row.sequence_id}: a row that samples nothing"
    return row.sample
