"""Encodes SampleSpecs as the rows of numbers that the sampling kernel reads, and decodes its results to StepTokens.

Rules are few and repeat from step to step, so each rule is encoded once and its row is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ....kernels.sampling import logits as kernel
from ....models.region import coord_of_bin, size_of_bins
from ....types.model_config import ModelConfig
from ....types.requests import SamplingParams
from ....types.step import MAX_TOP, SampleSpec, StepToken, TokenRule, noise_key

RULE_WIDTH = kernel.RULE_WIDTH
FLAGS_COLUMN = 5
"""The column of a rule with its READS_ flags. The sampling kernel does not read it; `keep_rows` does."""
READS_COORD, READS_SIZE = 1, 2
TOP_WIDTH = 2 * MAX_TOP
"""The number of int32 columns for the likeliest ids of a row: the ids, then their log-probabilities as bits."""

_MAX_TOP_K = 2**31 - 1
_MAX_CACHED = 4096
"""The most cached rules. A built-in skill has few rules, but a plug-in may create many."""


def fits(rule: TokenRule) -> bool:
    """Returns whether the rule's lists fit into its row of numbers."""
    return len(rule.suppressed) <= kernel.MAX_SUPPRESSED and (
        rule.allowed is None or len(rule.allowed) <= kernel.MAX_ALLOWED
    )


def with_mask(rule: TokenRule, vocab_size: int) -> tuple[TokenRule, bytes | None]:
    """Returns a rule that fits and a mask, which together forbid what ``rule`` forbids. The mask may be None.

    Raises AssertionError if the rule allows ids, but suppresses all of them.
    """
    if fits(rule):
        return (rule, None) if rule.mask is None else (replace(rule, mask=None), rule.mask)
    assert rule.allowed is None or set(rule.allowed) - set(rule.suppressed), (
        f"{rule} forbids every id"
    )
    mask = _mask_of_lists(rule.allowed, rule.suppressed, vocab_size)
    if rule.mask is not None:
        mask = (np.frombuffer(mask, np.uint8) & np.frombuffer(rule.mask, np.uint8)).tobytes()
    return replace(rule, mask=None, allowed=None, suppressed=()), mask


@lru_cache(64)
def _mask_of_lists(
    allowed: tuple[int, ...] | None, suppressed: tuple[int, ...], vocab_size: int
) -> bytes:
    kept = np.zeros(8 * TokenRule.mask_bytes(vocab_size), bool)
    kept[slice(vocab_size) if allowed is None else list(allowed)] = True
    kept[list(suppressed)] = False
    return np.packbits(kept, bitorder="little").tobytes()


def encode_rule(rule: TokenRule) -> np.ndarray:
    """Encodes a rule that fits as [RULE_WIDTH] int32. Raises AssertionError if the rule forbids every id."""
    row = np.zeros(RULE_WIDTH, np.int32)
    row[kernel.FORCED] = -1 if rule.forced is None else rule.forced
    row[kernel.OTHERWISE] = -1 if rule.otherwise is None else rule.otherwise
    row[kernel.STOP] = rule.stop
    row[FLAGS_COLUMN] = READS_COORD * rule.read_coord | READS_SIZE * rule.read_size
    if rule.forced is not None:
        return row
    row[kernel.NUM_TOP] = rule.top
    row[kernel.NUM_SUPPRESSED] = len(rule.suppressed)
    row[kernel.SUPPRESSED : kernel.SUPPRESSED + len(rule.suppressed)] = rule.suppressed
    if rule.allowed is not None:
        assert set(rule.allowed) - set(rule.suppressed), f"{rule} forbids every id"
        row[kernel.NUM_ALLOWED] = len(rule.allowed)
        row[kernel.ALLOWED : kernel.ALLOWED + len(rule.allowed)] = rule.allowed
    return row


_FORCED_ZERO = encode_rule(TokenRule(forced=0))
_PLACEHOLDER = encode_rule(TokenRule())
_GREEDY = SamplingParams()


class RuleEncoder:
    """Fills the host arrays of a pass. ``odd``: the specs of the last call for which `runtime.sampler` must draw, by
    row: those with edits, and draws with min-p. ``masks``: the masks of the other rows of the last call, by row."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.odd: dict[int, SampleSpec] = {}
        self.masks: dict[int, bytes] = {}
        self._table = np.zeros((64, RULE_WIDTH), np.int32)
        self._places: dict[TokenRule, int] = {}
        self._by_identity: dict[int, tuple[TokenRule, int]] = {}

    def encode(
        self, specs: Sequence[SampleSpec], host: Mapping[str, np.ndarray], padded: int
    ) -> list[int]:
        """Writes ``padded`` rows of ``host`` and returns the rows of ``odd``, in ascending order.

        ``host``: ``rules`` [rows, RULE_WIDTH] int32, ``temperature`` and ``top_p`` float64, ``top_k`` int32, and
        ``noise`` int64. Rows after ``specs`` are forced to id 0. An odd row becomes greedy and unrestricted, and keeps
        its READS_ flags. The caller sends the masks and calls `point_to_masks`.
        """
        count = len(specs)
        self.odd, self.masks = {}, {}
        places = []
        temperatures, top_ps, top_ks, keys = [], [], [], []
        # The cache is cleared only between calls, because a call copies rows out of the table at its end.
        if len(self._by_identity) > _MAX_CACHED:
            self._places.clear()
            self._by_identity.clear()
        known = self._by_identity
        for index, spec in enumerate(specs):
            rule, sampling = spec.rule, spec.sampling
            # Look up by identity first: hashing a rule's eight fields takes longer than the rest of its row.
            found = known.get(id(rule))
            if found is not None and found[0] is rule:
                place = found[1]
            elif rule.forced is None and (rule.mask is not None or rule.edits or not fits(rule)):
                place = self._place_with_mask(index, rule)
            else:
                place = self._place(rule)
            if sampling.is_odd and rule.forced is None:
                place = -1
            places.append(place)
            if place < 0:
                self.odd[index] = spec
                self.masks.pop(index, None)
                sampling = _GREEDY
            temperature = sampling.temperature
            temperatures.append(temperature)
            if temperature > 0:
                top_ps.append(sampling.top_p)
                top_ks.append(sampling.top_k)
                keys.append(noise_key(sampling.seed, spec.draw))
            else:
                top_ps.append(1.0)
                top_ks.append(0)
                keys.append(0)
        if count:
            np.take(self._table, places, axis=0, out=host["rules"][:count], mode="wrap")
            host["temperature"][:count] = temperatures
            host["top_p"][:count] = top_ps
            # Any integer is a valid top_k, so it is bounded here.
            host["top_k"][:count] = [k if k <= _MAX_TOP_K else _MAX_TOP_K for k in top_ks]
            host["noise"][:count] = np.array(keys, np.uint64).view(np.int64)
        if count < padded:
            host["rules"][count:padded] = _FORCED_ZERO
            host["temperature"][count:padded] = 0.0
            host["top_p"][count:padded] = 1.0
            host["top_k"][count:padded] = 0
            host["noise"][count:padded] = 0
        for index, spec in self.odd.items():
            row = host["rules"][index]
            row[:] = _PLACEHOLDER
            row[FLAGS_COLUMN] = (
                READS_COORD * spec.rule.read_coord | READS_SIZE * spec.rule.read_size
            )
        return list(self.odd)

    def point_to_masks(self, host: Mapping[str, np.ndarray], addresses: Sequence[int]) -> None:
        """Writes the device addresses of ``masks``, in their order, into the rows of the last call."""
        rows = host["rules"][list(self.masks), kernel.MASK : kernel.MASK + 2]
        rows.view(np.int64)[:, 0] = addresses
        host["rules"][list(self.masks), kernel.MASK : kernel.MASK + 2] = rows

    def _place_with_mask(self, index: int, rule: TokenRule) -> int:
        """Notes the mask of row ``index``, and returns the place of the rest of its rule; -1 if it has edits."""
        if rule.edits:
            return -1
        rest, mask = with_mask(rule, self._vocab_size)
        assert mask is not None, rule
        self.masks[index] = mask
        return self._place(rest)

    def _place(self, rule: TokenRule) -> int:
        """Returns the rule's row in the table, which is added if it is new."""
        place = self._places.get(rule)
        if place is None:
            place = len(self._places)
            if place == len(self._table):
                self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._table[place] = encode_rule(rule)
            self._places[rule] = place
        # The reference to the rule keeps its id from being reused by another object.
        self._by_identity[id(rule)] = (rule, place)
        return place


def decode_results(
    results: Tensor, specs: Sequence[SampleSpec], config: ModelConfig, tops: Tensor | None = None
) -> list[StepToken | None]:
    """Decodes ``results`` [len(specs), RESULT_WIDTH] int32 on the host, which `kernels.decode_io.keep_rows` writes.

    A row that is not finite becomes None. ``tops``: [len(specs), TOP_WIDTH] int32, the likeliest ids of the rows whose
    rules ask for them (SampleHead); None if no rule does.
    """
    assert len(results) == len(specs), (len(results), len(specs))
    numbers = results.numpy()
    logprobs = results.view(torch.float32).numpy()[:, 2].tolist()
    tokens = [
        StepToken(token, None, logprob)
        for token, logprob in zip(numbers[:, 0].tolist(), logprobs, strict=True)
    ]
    if any(spec.rule.read_coord or spec.rule.read_size for spec in specs):
        _add_values(tokens, results, specs, config)
    if tops is not None:
        _add_tops(tokens, tops, specs)
    if not numbers[:, 1].any():
        return [*tokens]
    return [None if bad else t for t, bad in zip(tokens, numbers[:, 1].tolist(), strict=True)]


def encode_top(top: Sequence[tuple[int, float]]) -> np.ndarray:
    """Encodes the likeliest ids of a row as `kernels.sampling.likeliest` does: [TOP_WIDTH] int32."""
    row = np.full((2, MAX_TOP), -1, np.int32)
    for place, (token, logprob) in enumerate(top):
        row[0, place] = token
        row[1].view(np.float32)[place] = logprob
    return row.reshape(TOP_WIDTH)


def _add_tops(tokens: list[StepToken], tops: Tensor, specs: Sequence[SampleSpec]) -> None:
    """Adds their likeliest ids to the tokens whose rules ask for them."""
    ids = tops[:, :MAX_TOP].tolist()
    logprobs = tops.view(torch.float32)[:, MAX_TOP:].tolist()
    for index, spec in enumerate(specs):
        count = 0 if spec.rule.forced is not None else spec.rule.top
        if count:
            pairs = zip(ids[index][:count], logprobs[index][:count], strict=True)
            top = tuple((token, logprob) for token, logprob in pairs if token >= 0)
            tokens[index] = replace(tokens[index], top=top)


def _add_values(
    tokens: list[StepToken], results: Tensor, specs: Sequence[SampleSpec], config: ModelConfig
) -> None:
    """Replaces tokens that have a value by tokens with the value."""
    coord_id, size_id = config.ids.coord_id, config.ids.size_id
    num_coords, num_sizes = config.region.coord_out_dim, config.region.size_out_dim // 2
    near = results.view(torch.float32)[:, 6:8].tolist()
    for index, (spec, bins) in enumerate(zip(specs, results[:, 3:6].tolist(), strict=True)):
        token, rule = tokens[index], spec.rule
        if rule.read_coord and token.id == coord_id:
            coord = coord_of_bin(bins[0], num_coords)
            tokens[index] = StepToken(token.id, coord, token.logprob, near[index][0])
        elif rule.read_size and token.id == size_id:
            size = size_of_bins(bins[1], bins[2], num_sizes)
            tokens[index] = StepToken(token.id, size, token.logprob, near[index][1])
