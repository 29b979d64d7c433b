"""Runs one image and prompt through two configurations and compares their tokens and the drift of their logits.

python -m benchmarks.diagnostics.compare_reference --model moondream2 --device cuda --left=--no-compile \\
    --right='--attention triton'

First, each side generates an answer. Then the right side is fed the left side's tokens (teacher forcing), and the
logits and the preferred tokens of both sides are compared at each step. If the preferred tokens differ, the step is a
tie if the left side's logits for both tokens differ by less than the tolerance: then rounding decides, which is no
error. The exit status is 1 if the tokens differ at any other step, or if the logits drift by more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_engine.types.step import StepToken

from ..models.sides import Request, Side, Talk, answer, compare_sides
from ..reports.report import Report


@dataclass(frozen=True)
class Place:
    """Both sides' outputs for the same preceding tokens. ``drift``: the root mean square difference of the logits, as a
    share of the left logits' standard deviation. ``margin``: the difference of the left logits of both preferred
    tokens, in the same unit."""

    left: StepToken
    right: StepToken
    drift: float
    worst: float
    margin: float

    @property
    def agrees(self) -> bool:
        return self.left.id == self.right.id and self.left.value == self.right.value


def drift(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Returns the root mean square and the largest difference of two rows of logits, as shares of ``left``'s standard
    deviation."""
    unit = float(left.std())
    apart = left - right
    return float(apart.square().mean().sqrt()) / unit, float(apart.abs().max()) / unit


def walk(left: Side, right: Side, request: Request) -> list[Place]:
    """Compares both sides at each token of the left side's answer."""
    talks = (Talk(left, request), Talk(right, request))
    control, places = request.control(), list[Place]()
    before: StepToken | None = None
    while len(places) < request.max_tokens:
        rule = control.rule(len(places))
        assert rule is not None, "every earlier token was accepted"
        rows = [talk.logits(before) for talk in talks]
        ours, theirs = (
            talk.begin(rule) if before is None else talk.feed(before, rule) for talk in talks
        )
        mean, worst = drift(*rows)
        margin = float(rows[0][ours.id] - rows[0][theirs.id]) / float(rows[0].std())
        places.append(Place(ours, theirs, mean, worst, margin))
        if control.accept(ours) is not None:
            break
        before = ours
    for talk in talks:
        talk.end()
    return places


def verdict(places: Sequence[Place], tolerance: float) -> tuple[str, bool]:
    """Returns a summary, and whether the sides agree."""
    worst = max(place.drift for place in places)
    parted = [i for i, place in enumerate(places) if not place.agrees]
    wrong = [i for i in parted if places[i].margin > tolerance or _value_differs(places[i])]
    findings = [f"drift at most {worst:.2g} of a standard deviation, tolerance {tolerance:.2g}"]
    if not parted:
        findings.append(f"the same {len(places)} tokens")
    else:
        findings.append(
            f"they part first at token {parted[0]}, in all at {len(parted)} of {len(places)}"
        )
        findings.append("all of them ties" if not wrong else f"no ties: {wrong}")
    return "; ".join(findings), not wrong and worst <= tolerance


def _value_differs(place: Place) -> bool:
    return place.left.id == place.right.id and place.left.value != place.right.value


def shown(token: StepToken, side: Side) -> str:
    """Formats a token: its id with its text or its value."""
    if token.value is None:
        return f"{token.id} {side.codec.decode([token.id])!r}"
    numbers = [getattr(token.value, name) for name in token.value.__dataclass_fields__]
    return f"{token.id} {' '.join(f'{n:.4f}' for n in numbers)}"


def compare(
    left: Side, right: Side, request: Request, report: Report, tolerance: float | None = None
) -> bool:
    """Fills ``report`` and returns whether the sides agree."""
    for name, side in (("left", left), ("right", right)):
        talk = Talk(side, request)
        said = answer(talk, request)
        talk.end()
        text = side.codec.decode([token.id for token in said])
        report.add("answers", {"side": name, "tokens": len(said), "of": side.label, "text": text})
    places = walk(left, right, request)
    for index, place in enumerate(places):
        row: dict[str, float | int | str] = {
            "token": index,
            "drift": place.drift,
            "worst": place.worst,
            "margin": place.margin,
            "left logprob": place.left.logprob or 0.0,
            "right logprob": place.right.logprob or 0.0,
            "": "" if place.agrees else "PARTED",
            "left": shown(place.left, left),
            "right": shown(place.right, right),
        }
        report.add("along what the left side says", row)
    summary, well = verdict(places, tolerance or max(s.tolerance for s in (left, right)))
    print(f"\n{'well' if well else 'WRONG'}: {summary}")
    return well


def main(arguments: Sequence[str] | None = None) -> None:
    tolerance = "allowed drift, and limit of ties [by dtype]"
    compare_sides("diagnostics.compare_reference", __doc__, tolerance, compare, arguments)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
