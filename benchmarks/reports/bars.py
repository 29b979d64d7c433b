"""The bar and the goal of each figure for one NVIDIA H200, with random weights of the true shapes."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    bar: float | None = None
    goal: float | None = None


NONE = Limits()

TRACE = {
    ("moondream2", 64, 3): Limits(95, 114),
    ("moondream2", 64, 30): Limits(82, 98),
    ("moondream3-preview", 64, 3): Limits(85, 106),
    ("moondream3-preview", 64, 30): Limits(66, 83),
    ("moondream2", 1, 3): Limits(45, 60),
}
"""Requests/s by model, requests in flight and tokens an answer."""

TRACE_P50_MS = {
    ("moondream2", 1, 3, "uncached"): Limits(38, 26),
    ("moondream2", 1, 3, "repeats"): Limits(9, 6),
}

DECODE_SHARE = {
    ("moondream2", 1): Limits(0.56, 0.80),
    ("moondream2", 16): Limits(0.64, 0.80),
    ("moondream2", 64): Limits(0.81, 0.88),
    ("moondream3-preview", 1): Limits(0.45, 0.65),
    ("moondream3-preview", 16): Limits(0.50, 0.65),
    ("moondream3-preview", 64): Limits(0.60, 0.75),
}
"""Of the decode step's memory floor, by model and batch."""

VISION_TFLOPS = {56: Limits(490, 560), 9: Limits(440, 520)}
"""By crops; both models have one tower."""

PREFILL_TFLOPS = {("moondream2", 16): Limits(560, 640)}
"""By model and images."""

MOE_TFLOPS = Limits(450, 700)
"""MoE layers of Moondream 3 in the prefix prefill of 16 images; the goal is for FP8 arithmetic."""

GPU_BUSY = Limits(0.90, 0.97)
"""Kernel time over wall, saturated decode of 64 streams through gRPC."""

GRPC_SHARE = Limits(0.90, 0.95)
"""Tokens/s through gRPC over those of the engine alone, 64 streams."""

READY_S = {"moondream2": Limits(25, 15), "moondream3-preview": Limits(60, 40)}
"""From the server's start until it is ready."""
