"""Compares Moondream 3's tau factors, by layer and head, between the kernels and plain torch.

python -m benchmarks.diagnostics.probe_tau --model moondream3-preview --device cuda [--layer 7]

A request's prompt runs through plain torch. Each layer's qkv from this run is the input of the prefill kernels and, for
the last position, of the decode kernel. The factors are computed from the queries and values that the kernels return.
Errors do not accumulate over layers, so every layer above the tolerance is faulty itself. --layer shows its heads. The
exit status is 1 if the error of a factor exceeds the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.text import Placement, Tau, TextBlock
from kestrel_engine.types.step import Row

from ..models.hand_made_steps import HandMadeSteps
from ..models.opening import parse
from ..models.sides import Request, Side, add_request_arguments, make_request, open_side
from ..reports.report import Report, benchmark_parser

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Of a factor, which lies between -0.5 and 2.5."""


@dataclass(frozen=True)
class Layer:
    """One block's qkv [num_tokens, 3 * dim], before tau factors and RoPE, and the positions of its tokens."""

    block: TextBlock
    tau: Tau
    qkv: Tensor
    positions: Tensor
    placement: Placement


@dataclass(frozen=True)
class Factors:
    """By [tokens, heads], float32."""

    queries: Tensor
    values: Tensor


@dataclass(frozen=True)
class Probe:
    """One layer's factors by plain torch and by the kernels. ``decode_values``: [1, heads], for the last token only.
    The decode kernel does not return its scaled queries."""

    index: int
    plain: Factors
    prefill: Factors
    decode_values: Tensor

    @property
    def errors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Largest by head: of queries, of values, of decoded values; [heads] each."""
        return (
            (self.prefill.queries - self.plain.queries).abs().amax(dim=0),
            (self.prefill.values - self.plain.values).abs().amax(dim=0),
            (self.decode_values - self.plain.values[-1:]).abs().amax(dim=0),
        )

    @property
    def worst(self) -> float:
        """NaN if any is."""
        return float(torch.cat(self.errors).max())


@torch.inference_mode()
def layers(side: Side, request: Request) -> Iterator[Layer]:
    """Returns every block's qkv for the request's prompt, computed by plain torch."""
    from kestrel_engine.runtime.torch_runtime import TorchRuntime

    runtime = side.runtime
    assert isinstance(runtime, TorchRuntime), f"{type(runtime).__name__} is not plain torch"
    steps = HandMadeSteps(runtime)
    held = steps.hold(request.positions)
    if request.image is not None:
        steps.encode([request.image])
    row: Row = steps.row(held, request.prompt, 0)
    batch = runtime.batch([row])
    x, text = batch.embeddings, runtime.model.text
    placement = text.place(batch.positions)
    for block in text.blocks:
        assert block.tau is not None, "this model has no tau attention"
        yield Layer(block, block.tau, block.qkv(block.ln(x)), batch.positions, placement)
        x = block(x, placement, batch.attention)


@torch.inference_mode()
def probe(model: Moondream, layer: Layer) -> Probe:
    """Runs the kernels on one layer's qkv and computes the factors that they applied."""
    from kestrel_engine.kernels.attention.paged_decode import paged_decode
    from kestrel_engine.kernels.attention.rope_store import rope_store
    from kestrel_engine.kernels.attention.tau_content import TauWorkspace, tau_content
    from kestrel_engine.runtime.gpu.text.layers import rotary_angles

    config, qkv, tau = model.config.text, layer.qkv, layer.tau
    tokens, heads, size = len(qkv), config.n_heads, config.head_dim
    device = qkv.device
    cos, sin = rotary_angles(config, device)
    workspace = TauWorkspace.allocate(2 * heads, device)
    content = tau_content(qkv, tau.weights, workspace)
    keys = torch.zeros(tokens, heads, size, dtype=qkv.dtype, device=device)
    values = torch.zeros_like(keys)
    out = qkv.clone()
    slots = torch.arange(tokens, device=device)
    rope_store(out, layer.positions, slots, keys, values, cos, sin, tau=(content, tau.alpha))
    turned = qkv.clone().view(tokens, 3 * heads, size)
    layer.placement.rotation.apply_(turned[:, : 2 * heads])
    raw = qkv.view(tokens, 3, heads, size)
    scaled = out.view(tokens, 3, heads, size)
    prefill = Factors(ratio(scaled[:, 0], turned[:, :heads]), ratio(values, raw[:, 2]))
    # The last token again, by decode: its slot alone is written.
    values[-1].zero_()
    paged_decode(
        qkv[-1:],
        keys,
        values,
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        layer.positions[-1:].int(),
        cos,
        sin,
        page_size=tokens,
        tau=(tau_content(qkv[-1:], tau.weights, workspace), tau.alpha),
        splits=1,
        workspace=None,
        out=torch.empty(1, heads * size, dtype=qkv.dtype, device=device),
    )
    plain = Factors(*tau.factors(qkv, layer.placement.log_position))
    return Probe(layer.block.index, plain, prefill, ratio(values[-1:], raw[-1:, 2]))


def ratio(scaled: Tensor, raw: Tensor) -> Tensor:
    """Returns the signed factor between head vectors [tokens, heads, head_dim] by least squares: [tokens, heads]."""
    scaled, raw = scaled.float(), raw.float()
    return (scaled * raw).sum(dim=-1) / raw.square().sum(dim=-1).clamp_min(1e-30)


def report_layer(report: Report, found: Probe) -> None:
    queries, values, decoded = (float(errors.max()) for errors in found.errors)
    of_q, of_v = found.plain.queries, found.plain.values
    row: dict[str, float | int | str] = {
        "layer": found.index,
        "q mean": float(of_q.mean()),
        "q low": float(of_q.min()),
        "q high": float(of_q.max()),
        "v mean": float(of_v.mean()),
        "v low": float(of_v.min()),
        "v high": float(of_v.max()),
        "q error": queries,
        "v error": values,
        "decode v": decoded,
        "worst head": int(torch.stack(found.errors).amax(dim=0).argmax()),
    }
    report.add("tau factors by plain torch; largest errors of the kernels", row)


def report_heads(report: Report, found: Probe) -> None:
    for head, errors in enumerate(zip(*found.errors, strict=True)):
        row: dict[str, float | int | str] = {
            "head": head,
            "q mean": float(found.plain.queries[:, head].mean()),
            "q kernel": float(found.prefill.queries[:, head].mean()),
            "v mean": float(found.plain.values[:, head].mean()),
            "v kernel": float(found.prefill.values[:, head].mean()),
            "last v": float(found.plain.values[-1, head]),
            "decode v": float(found.decode_values[0, head]),
        }
        names = ("q error", "v error", "decode error")
        row |= {name: float(error) for name, error in zip(names, errors, strict=True)}
        report.add(f"heads of layer {found.index}", row)


def run(
    side: Side, request: Request, report: Report, *, tolerance: float | None, heads_of: int | None
) -> list[Probe]:
    """Fills ``report`` and returns the layers whose errors exceed the tolerance."""
    model = side.runtime.model
    tolerance = tolerance or TOLERANCES[side.dtype]
    beyond, shown = [], None
    for layer in layers(side, request):
        found = probe(model, layer)
        report_layer(report, found)
        # NaN exceeds every tolerance in this comparison.
        if not found.worst <= tolerance:
            beyond.append(found)
        if found.index == heads_of:
            shown = found
    if shown is not None:
        report_heads(report, shown)
    named = ", ".join(f"{found.index} ({found.worst:.3g})" for found in beyond)
    verdict = f"WRONG: layers {named}" if beyond else "well: every factor"
    print(f"\n{verdict} {'beyond' if beyond else 'within'} {tolerance:.2g}")
    return beyond


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("diagnostics.probe_tau", __doc__)
    add_request_arguments(parser)
    parser.add_argument("--layer", type=int, help="show the heads of this layer")
    parser.add_argument("--tolerance", type=float, help="allowed error of a factor [by dtype]")
    args, of_model = parse(parser, arguments)
    report = Report("probe_tau", vars(args))
    side = open_side("--no-compile", of_model)
    try:
        request = make_request(args, side)
        beyond = run(side, request, report, tolerance=args.tolerance, heads_of=args.layer)
    finally:
        side.runtime.close()
    report.finish(args.json)
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
