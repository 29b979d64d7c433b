"""Compares the KV caches of two configurations for the same request, by layer, and finds their first difference.

python -m benchmarks.diagnostics.inspect_kv --model moondream3-preview --left=--no-compile --right='--attention triton'

The left side generates an answer, and the right side is fed the same tokens. Then the keys and values of all positions
are compared, separately for the image prefix, the rest of the prompt and the decoded tokens, because different code
writes them. An error is a root mean square, as a share of the root mean square of the left side's layer. Errors grow
with depth, so the lowest layer with an error above the tolerance, and its first position and head, show where to look.
The exit status is 1 if there is one. The tolerance applies to a stretch of positions. A single head of one position may
have ten times that error. In half precision or with an FP8 KV cache, one position in a hundred may exceed even that:
rounding may route a token to another expert, and then only this token differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kestrel_engine.types.requests import num_positions

from ..models.sides import Request, Side, Talk, answer, compare_sides, follow
from ..reports.report import Report

OF_ONE_HEAD = 10
"""The allowed error of one head of one position, in tolerances."""
STRAYS = 0.01
"""The share of a stretch's positions that may exceed even that error, in half precision or with an FP8 KV cache."""


@dataclass(frozen=True)
class Contents:
    """Keys and values [layers, positions, heads, head_dim] float32 on the CPU, in the order of positions."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Difference:
    """The first head vector with an error above the tolerance. ``error``: a share of the layer's root mean square."""

    layer: int
    tensor: str
    position: int
    phase: str
    head: int
    error: float


def contents(side: Side, talk: Talk) -> Contents:
    """Returns the contents of the KV cache for the positions of ``talk``."""
    cache = side.cache
    if cache.keys.is_cuda:
        torch.cuda.synchronize(cache.keys.device)
    slots = cache.slots(talk.pages, talk.positions)
    return Contents(*(real.cpu() for real in cache.read(slots)))


def phases(request: Request, positions: int) -> Mapping[str, slice]:
    """Returns the stretches of positions that different code writes. None is empty."""
    prompt = num_positions(request.prompt)
    prefix = 0 if request.image is None else request.context.model.image_prefix
    found = {
        "image": slice(0, prefix),
        "prompt": slice(prefix, prompt),
        "decoded": slice(prompt, positions),
    }
    return {name: stretch for name, stretch in found.items() if stretch.stop > stretch.start}


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def first_difference(
    left: Contents,
    right: Contents,
    stretches: Mapping[str, slice],
    tolerance: float,
    strays: float = 0.0,
) -> Difference | None:
    """Returns the first difference of the lowest layer, by position, keys before values. ``strays``: see STRAYS."""
    for layer in range(len(left.keys)):
        found: list[Difference] = []
        for name in ("keys", "values"):
            ours, theirs = (getattr(side, name)[layer] for side in (left, right))
            apart, unit = ours - theirs, rms(ours)
            for phase, stretch in stretches.items():
                errors = apart[stretch].square().mean(dim=-1).sqrt() / unit
                # NaN exceeds every tolerance in this comparison.
                within = rms(apart[stretch]) / unit <= tolerance
                allowed = OF_ONE_HEAD * tolerance if within else tolerance
                beyond = (~(errors <= allowed)).nonzero()
                num_strays = int(strays * len(errors)) if within else 0
                if len(beyond[:, 0].unique()) > num_strays:
                    place, head = beyond[0].tolist()
                    error = float(errors[place, head])
                    position = stretch.start + place
                    found.append(Difference(layer, name, position, phase, head, error))
        if found:
            return min(found, key=lambda d: d.position)
    return None


def inspect(
    left: Side, right: Side, request: Request, report: Report, tolerance: float | None = None
) -> Difference | None:
    """Fills ``report`` and returns the first difference above the tolerance."""
    ours, theirs = Talk(left, request), Talk(right, request)
    said = answer(ours, request)
    follow(theirs, request, said)
    held = (contents(left, ours), contents(right, theirs))
    stretches = phases(request, ours.positions)
    ours.end()
    theirs.end()
    for layer in range(left.config.text.n_layers):
        for name in ("keys", "values"):
            a, b = (getattr(side, name)[layer] for side in held)
            row: dict[str, float | int | str] = {
                "layer": layer,
                "tensor": name,
                "rms": rms(a),
                "right's rms": rms(b),
                "largest": float(a.abs().max()),
                "right's": float(b.abs().max()),
            }
            for phase, stretch in stretches.items():
                row[phase] = rms(a[stretch] - b[stretch]) / rms(a)
            report.add("cache contents; of image, prompt and decoded the error", row)
    tolerance = tolerance or max(s.tolerance for s in (left, right))
    strays = 0.0 if left.exact and right.exact else STRAYS
    found = first_difference(*held, stretches, tolerance, strays)
    if found is None:
        print(f"\nwell: within {tolerance:.2g} everywhere")
    else:
        print(
            f"\nWRONG: first beyond {tolerance:.2g}: layer {found.layer}, {found.tensor}, position {found.position} "
            f"({found.phase}), head {found.head}: {found.error:.3g}"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    def compare(*given: Any) -> bool:
        return inspect(*given) is None

    tolerance = "allowed error of a stretch [by dtype]"
    compare_sides("diagnostics.inspect_kv", __doc__, tolerance, compare, arguments)


if __name__ == "__main__":
    main()
