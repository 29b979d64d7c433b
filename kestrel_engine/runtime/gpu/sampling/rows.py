"""RowSampler: encodes the rules of a pass's rows and samples their tokens.

Decode and prefill have one each, because captured passes need fixed buffers. Masks are sent before each pass, and the
rule of a row holds the address of its mask. If a rule has edits, or a row draws with min-p, the reference sampler draws
the token after the pass, and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ....kernels.sampling.logits import MASKED_AT_ONCE
from ....models.moondream import Moondream
from ....types.model_config import ModelConfig
from ....types.step import Row, SampleSpec
from ...sampler import sample
from ..graphs import Variant, ladder
from ..state.sequence_state import SequenceState
from ..state.staging import RowBuffers, Uploader
from ..text.decoder import FusedText
from .head import ROW_FIELDS, SampleHead
from .rules import RuleEncoder


class RowSampler:
    """Samples up to ``max_rows`` rows. ``rows``: the inputs of the rows; the caller fills ``seqs`` and sends them."""

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
        vocab_size = config.text.vocab_size
        self._rules = RuleEncoder(vocab_size)
        self._mask_bytes = -(-vocab_size // MASKED_AT_ONCE) * MASKED_AT_ONCE // 8
        self._upload = Uploader(device)
        self._masks: Tensor | None = None
        """The masks of the last `encode`, which must stay in memory until the pass has run."""
        self._odd: list[int] = []
        self._wants_tops = False
        """Whether a row of the last `encode` asks for its likeliest ids."""

    def encode(
        self, rows: Sequence[Row], host: dict[str, np.ndarray], padded: int, *, spatial: bool
    ) -> Variant:
        """Fills the rule fields of ``padded`` rows of ``host`` and returns the variant of the pass.

        ``host``: from ``rows.host()``, with ``seqs`` filled for ``rows``. ``spatial``: an input token may be a
        coordinate or a size.
        """
        specs = [spec_of(row) for row in rows]
        self._odd = self._rules.encode(specs, host, padded)
        self._send_masks(host)
        self._wants_tops = any(spec.rule.top for spec in specs)
        reads = self._state.note_rules(host["seqs"][: len(rows)].tolist(), specs)
        greedy = all(spec.sampling.temperature == 0 for spec in specs)
        return Variant(padded, greedy, spatial or reads)

    def send_padding(self, padded: int) -> None:
        """Sends rows of the spare sequence, whose input and output are id 0."""
        host = self.rows.host()
        for name in ("positions", "kinds", "ids"):
            host[name][:padded] = 0
        host["seqs"][:padded] = self._state.spare
        host["new_pages"][:padded] = -1
        self._odd = self._rules.encode([], host, padded)
        self._send_masks(host)
        self._wants_tops = False
        self.rows.send()

    def warm_up(self, hidden: Tensor) -> None:
        """Samples for the spare sequence in every variant: compiles what is not compiled yet. ``hidden`` [M, dim]: as
        many rows as a pass may have."""
        self.send_padding(len(hidden))
        for count in ladder(len(hidden)):
            for greedy in (True, False):
                for spatial in (True, False):
                    self(hidden[:count], Variant(count, greedy, spatial))
        self.head.tops(self.rows.device, len(hidden))

    def __call__(self, hidden: Tensor, variant: Variant) -> None:
        """Samples from ``hidden`` [num_rows, dim], the residual stream before ``post_ln``, and fills
        ``head.results``."""
        self.head(hidden, self.rows.device, variant)
        self.redraw(hidden, variant)

    def redraw(self, hidden: Tensor, variant: Variant) -> None:
        """Replaces the tokens that the kernels cannot draw, after a pass that may have been captured.

        ``hidden``, ``variant``: of that pass.
        """
        if not self._odd:
            return
        logits = self.head.logits[self._odd].float()
        drawn = sample(logits, [self._rules.odd[row] for row in self._odd])
        for row, found in zip(self._odd, drawn, strict=True):
            if found is not None:  # If it is None, the kernel has flagged the row as well.
                self.head.replace(row, found)
        self.head.keep(hidden, self.rows.device, variant)

    def tops(self, count: int) -> Tensor | None:
        """Returns the likeliest ids of the ``count`` rows of the last pass: [count, TOP_WIDTH] int32; None if no rule
        asks for them, which costs nothing. Runs after the pass, captured or not."""
        return self.head.tops(self.rows.device, count) if self._wants_tops else None

    def _send_masks(self, host: dict[str, np.ndarray]) -> None:
        """Sends the masks of the last `encode`, and writes their addresses into the rules of ``host``."""
        masks = self._rules.masks
        if not masks:
            self._masks = None
            return
        padded = np.zeros((len(masks), self._mask_bytes), np.uint8)
        for row, mask in zip(padded, masks.values(), strict=True):
            row[: len(mask)] = np.frombuffer(mask, np.uint8)
        self._masks = self._upload({"masks": padded})["masks"]
        first = self._masks.data_ptr()
        self._rules.point_to_masks(host, [first + i * self._mask_bytes for i in range(len(masks))])


def spec_of(row: Row) -> SampleSpec:
    """Returns the SampleSpec of a row. Raises AssertionError if the row does not sample."""
    assert row.sample is not None, f"sequence {row.sequence_id}: a row that samples nothing"
    return row.sample
