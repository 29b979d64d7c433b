"""RowSampler: encodes the rules of a pass's rows and samples their tokens.

Decode and prefill have one each, because captured passes need fixed buffers. Masks are sent before each pass, and the
rule of a row holds the address of its mask. If a rule has edits, or a row draws with min-p, the reference sampler draws
the token after the pass, and the host waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ....kernels.decode_io import RESULT_WIDTH, Bins, SampledTokens, keep_rows
from ....kernels.sampling.likeliest import likeliest
from ....kernels.sampling.logits import MASKED_AT_ONCE
from ....kernels.sampling.read_bins import read_bins
from ....kernels.sampling.sample import allocate, sample_rows
from ....models.moondream import Moondream
from ....models.region import RegionModel
from ....types.model_config import ModelConfig
from ....types.step import MAX_TOP, NEAR_BINS, Row, SampleSpec
from ...sampler import DrawnToken, sample
from ..graphs import Variant, ladder
from ..state.sequence_state import SequenceState
from ..state.staging import Field, RowBuffers, Uploader
from ..text.decoder import FusedText
from .rules import (
    FLAGS_COLUMN,
    READS_COORD,
    READS_SIZE,
    RULE_WIDTH,
    TOP_WIDTH,
    RuleEncoder,
    encode_top,
)

ROW_FIELDS: Mapping[str, Field] = {
    "top_p": Field(np.float64),
    "noise": Field(np.int64),
    "seqs": Field(np.int32),
    "positions": Field(np.int32),
    "kinds": Field(np.int32),
    "ids": Field(np.int32),
    "values": Field(np.float32, (2,)),
    "rules": Field(np.int32, (RULE_WIDTH,)),
    "top_k": Field(np.int32),
    "new_pages": Field(np.int32, (2,)),
    "temperature": Field(np.float64),
}
"""The inputs of each row of a pass, which the host writes."""


class SampleHead:
    """Owns the outputs of up to ``max_rows`` rows. All passes of a runtime share ``sampled``."""

    def __init__(
        self,
        text: FusedText,
        region: RegionModel,
        config: ModelConfig,
        sampled: SampledTokens,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._text, self._region, self._sampled = text, region, sampled
        self._config = config
        vocab_size = config.text.vocab_size
        self.logits = torch.empty(max_rows, vocab_size, dtype=text.dtype, device=device)
        """The logits of the last pass."""
        self._workspace = allocate(max_rows, vocab_size, device)
        self._ids = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._bad = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self.results = torch.zeros(max_rows, RESULT_WIDTH, dtype=torch.int32, device=device)
        self._tops = torch.zeros(max_rows, TOP_WIDTH, dtype=torch.int32, device=device)

    def __call__(
        self,
        hidden: Tensor,
        rows: Mapping[str, Tensor],
        variant: Variant,
        *,
        normed: Tensor | None = None,
    ) -> None:
        """Samples a token for each row and fills ``results``.

        ``hidden``: [num_rows, dim], the residual stream before ``post_ln``. ``normed``: the same after ``post_ln``, if
        the caller has it. ``rows``: the device arrays of a RowBuffers.
        """
        n = variant.num_rows
        sample_rows(
            self._text.logits(hidden, normed=normed, out=self.logits[:n]),
            rows["rules"][:n],
            rows["temperature"][:n],
            rows["top_p"][:n],
            rows["top_k"][:n],
            rows["noise"][:n],
            greedy=variant.greedy,
            ids=self._ids[:n],
            logprobs=self._logprobs[:n],
            bad=self._bad[:n],
            workspace=self._workspace,
            pdl=self._text.early,
        )
        self.keep(hidden, rows, variant)

    def replace(self, row: int, drawn: DrawnToken) -> None:
        """Replaces the token of one row of the last pass. `keep` must follow."""
        self._ids[row] = drawn.id
        self._logprobs[row] = drawn.logprob
        if drawn.top:
            self._tops[row] = torch.from_numpy(encode_top(drawn.top))

    def tops(self, rows: Mapping[str, Tensor], count: int) -> Tensor:
        """Returns the likeliest ids of the first ``count`` rows of the last pass: [count, TOP_WIDTH] int32.

        The pass may have been captured: its logits are at a fixed address. Only the rows whose rules ask for ids are
        filled.
        """
        found = self._tops[:count]
        likeliest(
            self.logits[:count],
            rows["rules"][:count],
            self._workspace,
            found.view(count, 2, MAX_TOP),
        )
        return found

    def keep(self, hidden: Tensor, rows: Mapping[str, Tensor], variant: Variant) -> None:
        """Reads values from the region heads where rules demand it, and stores all tokens for the next pass."""
        n = variant.num_rows
        coords = sizes = None
        if variant.spatial:
            coords = _bins(self._region.coord_logits(hidden)[:, None])
            sizes = _bins(self._region.size_logits(hidden))
        keep_rows(
            hidden,
            rows["seqs"][:n],
            rows["rules"][:n, FLAGS_COLUMN],
            self._ids[:n],
            self._logprobs[:n],
            self._bad[:n],
            coords,
            sizes,
            self._sampled,
            self.results[:n],
            coord_id=self._config.ids.coord_id,
            size_id=self._config.ids.size_id,
            reads_coord=READS_COORD,
            reads_size=READS_SIZE,
        )


def _bins(logits: Tensor) -> Bins:
    """Returns the best bins of ``logits`` [M, heads, num_bins] float32, with the probabilities near them."""
    rows, heads, num_bins = logits.shape
    bins, near = read_bins(logits.reshape(rows * heads, num_bins), NEAR_BINS)
    return Bins(bins.view(rows, heads), near.view(rows, heads), num_bins)


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
        """Fills ``head.results`` from ``hidden`` [num_rows, dim], the residual stream before ``post_ln``."""
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
