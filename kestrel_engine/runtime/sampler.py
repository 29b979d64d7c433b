"""Samples ids with their log-probabilities from logits and TokenRules. No row depends on the other rows of its batch.

The order of operations is: edits; masks; temperature, min-p, top-k and top-p, which keeps the token that crosses the
threshold; the draw; then ``otherwise``. The caller handles forced ids and the values of the region heads.

The draw takes the id with the largest weight / noise. The noise of an id is exponentially distributed and a hash of
seed, draw and id, so an id wins with its probability (the Gumbel-max trick: Gumbel 1954, Maddison et al. 2014).
Changes of the logits by a rounding error change the winner only if the two largest quotients are as close, or if an id
at the cut of top-k, top-p or min-p wins. The order of the ids by logit does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..types.step import SampleSpec, TokenRule, noise_key

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest ids with their log-probabilities (StepToken.top)."""


class DrawnToken(NamedTuple):
    """A sampled id, its log-probability, and the likeliest ids."""

    id: int
    logprob: float
    top: Top = ()


def sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[DrawnToken | None]:
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


def _sample(logits: Tensor, specs: Sequence[SampleSpec]) -> list[DrawnToken]:
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
        DrawnToken(
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
    x = logits.double()
    # The largest logit is subtracted before the division, so a tiny temperature tends to greedy and never to inf - inf.
    temperatures = _column([s.sampling.temperature for s in specs], device)
    scaled = (x - x.amax(dim=-1, keepdim=True)) / temperatures
    least = [math.log(s.sampling.min_p) if s.sampling.min_p else -math.inf for s in specs]
    weights = scaled.exp().masked_fill(scaled < _column(least, device), 0.0)
    cut = [i for i, s in enumerate(specs) if s.sampling.top_k or s.sampling.top_p < 1]
    if cut:
        weights[cut] = _truncated(x[cut], weights[cut], [specs[i] for i in cut])
    keys = [noise_key(s.sampling.seed, s.draw) for s in specs]
    return (weights / exponentials(keys, logits.shape[-1], device)).argmax(dim=-1)


def _truncated(logits: Tensor, weights: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Returns ``weights`` [rows, vocab], with 0 for the ids that top-k or top-p leaves out. Rank 0 always remains."""
    device, vocab_size = logits.device, logits.shape[-1]
    ids = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = weights.gather(1, ids)
    # Any integer is a valid top_k, so it is bounded before it becomes a float.
    top_k = _column([min(s.sampling.top_k or vocab_size, vocab_size) for s in specs], device)
    ranked = ranked.masked_fill(torch.arange(vocab_size, device=device) >= top_k, 0.0)
    mass = ranked / ranked.sum(dim=-1, keepdim=True)
    before = mass.cumsum(dim=-1) - mass
    ranked = ranked.masked_fill(before > _column([s.sampling.top_p for s in specs], device), 0.0)
    return torch.zeros_like(weights).scatter_(1, ids, ranked)


def exponentials(keys: Sequence[int], vocab_size: int, device: torch.device | str) -> Tensor:
    """Returns exponentially distributed noise: [keys, vocab_size] float64, above 0, by a hash of key and id.

    The keys are those of `noise_key`. The hash is output id + 1 of SplitMix64 with the state ``key``.
    """
    state = torch.tensor([_signed(key) for key in keys], device=device)[:, None]
    z = state + torch.arange(1, vocab_size + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = z ^ _shifted(z, 31)
    return -((_shifted(z, 12).double() + 0.5) * 2.0**-52).log()


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - (number >> 63 << 64)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """The bits of int64 ``z`` shifted right as those of an unsigned number."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _apply_otherwise(
    rule: TokenRule, token: int, logprob: float, logprobs: Tensor
) -> tuple[int, float]:
    if rule.otherwise is None or token == rule.stop:
        return token, logprob
    stopping = float(logprobs[rule.stop].exp())
    return rule.otherwise, math.log1p(-stopping) if stopping < 1 else logprob
