"""The bar and the goal of each figure for one NVIDIA H200, with random weights of the true shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Limits(NamedTuple):
    bar: float | None = None
    goal: float | None = None

    def below(self, floor: float) -> Limits:
        """Limits as shares of a floor, in the floor's unit."""
        return Limits(*(None if share is None else floor / share for share in self))


NONE = Limits()


def of_run(table: Mapping[Any, Limits], model: str, *rest: object) -> Limits:
    """The limits of a run of the trace. A run in FP8 without limits of its own has those of its model."""
    return table.get((model, *rest)) or table.get((model.removesuffix(" fp8"), *rest), NONE)


TRACE = {
    ("moondream2", 64, 3): Limits(96, 106),
    ("moondream2", 64, 30): Limits(84, 94),
    ("moondream2", 16, 3): Limits(98, 110),
    ("moondream2", 16, 30): Limits(72, 85),
    ("moondream2", 4, 3): Limits(80, 90),
    ("moondream2", 4, 30): Limits(48, 58),
    ("moondream2", 1, 3): Limits(58, 66),
    ("moondream2", 1, 30): Limits(23, 26),
    ("moondream2 fp8", 64, 3): Limits(115, 133),
    ("moondream2 fp8", 64, 30): Limits(96, 102),
    ("moondream3-preview", 64, 3): Limits(95, 116),
    ("moondream3-preview", 64, 30): Limits(76, 90),
    ("moondream3-preview", 16, 3): Limits(84, 95),
    ("moondream3-preview", 16, 30): Limits(58, 68),
    ("moondream3-preview", 1, 3): Limits(45, 55),
    ("moondream3-preview", 1, 30): Limits(19, 22),
}
"""Requests/s by model, requests in flight and tokens an answer; for one H100. Only Moondream 2 with 64 in flight has
bars of its own for FP8."""

TRACE_P50_MS = {
    ("moondream2", 1, 3, "uncached"): Limits(24, 20),
    ("moondream2", 1, 3, "repeats"): Limits(5.5, 4.5),
}
"""For one H100."""

TRACE_GAP_P95_MS = {
    ("moondream2", 64, 30): Limits(15, 8),
}
"""The gap between two tokens of an answer."""

DECODE_SHARE = {
    ("moondream2", 1): Limits(0.65, 0.78),
    ("moondream2", 16): Limits(0.64, 0.80),
    ("moondream2", 64): Limits(0.81, 0.88),
    ("moondream3-preview", 1): Limits(0.62, 0.78),
    ("moondream3-preview", 16): Limits(0.50, 0.65),
    ("moondream3-preview", 64): Limits(0.60, 0.75),
}
"""Of the decode step's memory floor, by model and batch. Those of one row are for an H200."""

DECODE_SHARED_MS = {("moondream2", 64): Limits(1.5, 1.1)}
"""Of a decode step whose rows are about one image, by model and batch."""

VISION_TFLOPS = {56: Limits(490, 560), 9: Limits(440, 520)}
"""By crops; both models have one tower."""

PREFILL_TFLOPS = {("moondream2", 16): Limits(560, 640)}
"""By model and images."""

MOE_TFLOPS = Limits(450, 700)
"""MoE layers of Moondream 3 in the prefix prefill of 16 images; the goal is for FP8 arithmetic."""

GRPC_SHARE = Limits(0.90, 0.95)
"""Tokens/s through gRPC over those of the engine alone, 64 streams."""

READY_S = {"moondream2": Limits(25, 15), "moondream3-preview": Limits(60, 40)}
"""From the server's start until it is ready."""
