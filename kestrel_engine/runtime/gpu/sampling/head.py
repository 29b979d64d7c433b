"""SampleHead: samples tokens from the residual stream of M rows and keeps them on the device for the next pass.

Captured decode passes and the ends of prefill passes use the same code. Its inputs are the arrays of a RowBuffers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ....kernels.decode_io import RESULT_WIDTH, Bins, SampledTokens, keep_rows
from ....kernels.sampling.likeliest import likeliest
from ....kernels.sampling.read_bins import read_bins
from ....kernels.sampling.sample import allocate, sample_rows
from ....models.region import RegionModel
from ....types.model_config import ModelConfig
from ....types.step import MAX_TOP, NEAR_BINS
from ...sampler import Drawn
from ..graphs import Variant
from ..state.staging import Field
from ..text.decoder import FusedText
from .rules import FLAGS_COLUMN, READS_COORD, READS_SIZE, RULE_WIDTH, TOP_WIDTH, encode_top

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

    def replace(self, row: int, drawn: Drawn) -> None:
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
