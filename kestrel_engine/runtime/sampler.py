"""Samples ids with their log-probabilities from logits and TokenRules. No row depends on the other rows of its batch.

The order of operations is: edits; masks; temperature, min-p, top-k and top-p, which keeps the token that crosses the
threshold; one inverse-CDF draw with ``step.uniform(seed, draw)``; then ``otherwise``. The caller handles forced ids and
the values of the region heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..types.step import SampleSpec, TokenRule, uniform

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest ids with their log-probabilities (StepToken.top)."""


class Drawn(NamedTuple):
    """A sampled id, its log-probability, and the likeliest ids."""

    id: int
    logprob: float
    top: Top = ()


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Drawn | None]:
    """Samples one id for each row of ``logits`` [rows, vocab] float32, and waits for the device.

    The result is None for a row whose logits are not finite. ``logits`` is overwritten. The logprob is that of the id
    under the rule, before temperature and truncation. An id that stands for all ids but the stop id (``otherwise``) has
    the joint probability of these ids.
    """
    assert len(logits) == len(specs), (len(logits), len(specs))
    if not specs:
        return []
    finite = torch.isfinite(logits).all(dim=-1).tolist()
    if not all(finite):
        good = [row for row, is_finite in enumerate(finite) if is_finite]
        drawn = iter(_sample(logits[good], [specs[row] for row in good]) if good else ())
        return [next(drawn) if is_finite else None for is_finite in finite]
    return [*_sample(logits, specs)]


def _sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[Drawn]:
    """As `sample`, for finite logits."""
    for row, spec in zip(logits, specs, strict=True):
        _mask_(row, spec.rule)
    ids = logits.argmax(dim=-1)
    drawn = [i for i, spec in enumerate(specs) if spec.sampling.temperature > 0]
    if drawn:
        ids[drawn] = _draw(logits[drawn], [specs[i] for i in drawn])
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, ids[:, None]).flatten()
    tops = _tops(logits, logprobs, [spec.rule.top for spec in specs])
    return [
        Drawn(
            *_apply_otherwise(spec.rule, int(i), float(logprob), logprobs[row]), tops.get(row, ())
        )
        for row, (spec, i, logprob) in enumerate(
            zip(specs, ids.tolist(), chosen.tolist(), strict=True)
        )
    ]


def _tops(logits: Tensor, logprobs: Tensor, counts: Sequence[int]) -> dict[int, Top]:
    """Returns the likeliest ids of the rows whose count is not 0, in the order of StepToken.top."""
    rows = [row for row, count in enumerate(counts) if count]
    if not rows:
        return {}
    if len(rows) < len(counts):
        logits, logprobs = logits[rows], logprobs[rows]
    # One id more than wanted shows whether the last is one of several equal ones, or a forbidden one.
    values, ids = logits.topk(min(max(counts) + 1, logits.shape[-1]))
    has_equal = ((values[:, 1:] == values[:, :-1]).any(dim=-1) | values[:, -1].isinf()).tolist()
    found = zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
    return {
        row: _exact_top(logits[at], logprobs[at], counts[row])
        if has_equal[at]
        else tuple(zip(of_row[: counts[row]], probabilities[: counts[row]], strict=True))
        for at, (row, (of_row, probabilities)) in enumerate(zip(rows, found, strict=True))
    }


def _exact_top(logits: Tensor, logprobs: Tensor, count: int) -> Top:
    """Returns the likeliest ids of a row with equal logits, among which ``topk`` chooses freely, or with few ids."""
    least = logits.topk(min(count, len(logits))).values[-1]
    ids = ((logits >= least) & (logits > -math.inf)).nonzero().flatten()
    order = logits[ids].argsort(descending=True, stable=True)[:count]
    found = ids[order]
    return tuple(zip(found.tolist(), logprobs[found].tolist(), strict=True))


def _mask_(row: Tensor, rule: TokenRule) -> None:
    """Changes logits by the rule's edits, and sets those that it forbids to -inf, in place."""
    assert rule.forced is None, f"id {rule.forced} is forced: nothing to sample"
    if rule.edits:
        _edit_(row, rule)
    if rule.allowed is not None:
        allowed = torch.tensor(rule.allowed, device=row.device)
        kept = row[allowed]
        row.fill_(-math.inf)
        row[allowed] = kept
    if rule.mask is not None:
        row[~allowed_ids(rule.mask, len(row)).to(row.device)] = -math.inf
    if rule.suppressed:
        row[torch.tensor(rule.suppressed, device=row.device)] = -math.inf
    if rule.allowed is not None:
        assert set(rule.allowed) - set(rule.suppressed), f"{rule} forbids every id"


def _edit_(row: Tensor, rule: TokenRule) -> None:
    """Changes logits by the rule's edits, in place. It computes in float64, as the draw does."""
    ids, bias, penalty, minus = (
        torch.tensor(column, device=row.device) for column in zip(*rule.edits, strict=True)
    )
    x = row[ids].double() + bias
    x = torch.where(x > 0, x / penalty, x * penalty) - minus
    row[ids] = x.to(row.dtype)


def allowed_ids(mask: bytes, vocab_size: int) -> Tensor:
    """Unpacks a TokenRule's mask to [vocab_size] bool."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:vocab_size].bool()


def _draw(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Draws [rows] int64 ids. It computes in float64, so that a draw close to a boundary is the same on all devices."""
    device = logits.device

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    ranked, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    # The largest logit is subtracted before the division, so a tiny temperature tends to greedy and never to inf - inf.
    scaled = (ranked - ranked[:, :1]) / column([s.sampling.temperature for s in specs])
    vocab_size = logits.shape[-1]
    # Any integer is a valid top_k, so it is bounded before it becomes a float.
    top_k = column([min(s.sampling.top_k or vocab_size, vocab_size) for s in specs])
    ranks = torch.arange(logits.shape[-1], device=device)
    least = column([math.log(s.sampling.min_p) if s.sampling.min_p else -math.inf for s in specs])
    scaled = scaled.masked_fill(scaled < least, -math.inf)
    mass = scaled.masked_fill(ranks >= top_k, -math.inf).softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass
    mass = mass.masked_fill(before > column([s.sampling.top_p for s in specs]), 0.0)
    # Rank 0 remains for all values of top_p and top_k, so the total is positive.
    cumulative = mass.cumsum(dim=-1)
    points = column([uniform(s.sampling.seed, s.draw) for s in specs]) * cumulative[:, -1:]
    rank = torch.searchsorted(cumulative, points, right=True)
    rank = rank.minimum((mass > 0).sum(dim=-1, keepdim=True) - 1)
    return ids.gather(1, rank).flatten()


def _apply_otherwise(
    rule: TokenRule, token: int, logprob: float, logprobs: Tensor
) -> tuple[int, float]:
    if rule.otherwise is None or token == rule.stop:
        return token, logprob
    stopping = float(logprobs[rule.stop].exp())
    return rule.otherwise, math.log1p(-stopping) if stopping < 1 else logprob
