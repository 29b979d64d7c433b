"""One decode step of the text decoder: a token a row, every launch and every buffer fixed by the number of rows.

A block is parallel, so it is at its shortest four launches: LayerNorm (which adds what the block before computed), one
GEMM for qkv and fc1, attention, and one GEMM for proj and fc2 whose partial sums the next LayerNorm adds. With few rows
experts have a router of their own and run beside all of attention, on a second stream: then what one of the two waits
for costs nothing while the other reads its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.layer_norm import add_layer_norm, layer_norm
from ...kernels.moe_decode import MAX_TOKENS, moe_decode
from ...kernels.moe_prefill import moe_prefill
from ...kernels.moe_route import route
from ...kernels.moe_router import RouterWorkspace, route_tokens
from ...kernels.skinny_linear import (
    MAX_ROWS,
    content_parts,
    default_splits,
    skinny_linear,
    skinny_partials,
)
from ...kernels.tau_content import TauWorkspace, tau_content
from ...model_config import TextConfig
from ...models.layers import LayerNorm, Linear
from ...models.text import Moe
from .decode_attention import DecodeAttention, PagedDecode
from .gemm import linear
from .text_layers import TextLayer


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How many rows a step may have to be laid out for latency.

    ``apart``: experts have a router of their own and run beside attention. ``inline_tau``: the GEMM of qkv also leaves
    what tau attention needs of it, in parts that attention adds up, instead of a launch between the two.
    """

    apart: int = 8
    inline_tau: int = 8


class DecodePass:
    """Owns the buffers of a step of up to ``max_rows`` rows. Steps share them, so they run one after another.

    ``overlap``: the MLP runs beside attention in dense layers too, and at any number of rows. ``attention``: None
    takes our own kernel.
    """

    def __init__(
        self,
        config: TextConfig,
        layers: list[TextLayer],
        post_ln: LayerNorm,
        angles: tuple[Tensor, Tensor],
        tau: TauWorkspace | None,
        *,
        max_rows: int,
        page_size: int,
        overlap: bool,
        pdl: bool,
        attention: DecodeAttention | None = None,
        plan: DecodePlan | None = None,
    ) -> None:
        self._config, self._layers, self._post_ln = config, layers, post_ln
        self._angles, self._tau, self._overlap = angles, tau, overlap
        self._plan = plan or DecodePlan()
        weight = layers[0].proj
        device = weight.device
        beside = (overlap or config.moe is not None) and weight.is_cuda
        self._side = torch.cuda.Stream(device) if beside else None
        self._early = pdl and weight.is_cuda
        self._max_rows = max_rows
        dim, heads = config.dim, config.n_heads
        widest = max(layer.reads.weight.shape[0] for layer in layers)
        chosen = config.moe.experts_per_token if config.moe else 1
        of_mlp = [default_splits(*layer.fc2.shape) for layer in layers if layer.fc2 is not None]

        def floats(*shape: int) -> Tensor:
            return torch.empty(math.prod(shape), dtype=torch.float32, device=device)

        self._u = weight.new_empty(max_rows * dim)
        self._read = weight.new_empty(max_rows * widest)
        self._written = floats(
            max(default_splits(*w.shape) for w in _writers(layers)), max_rows, dim
        )
        self._of_mlp = floats(max(chosen, *of_mlp), max_rows, dim)
        self._inline_tau = 0 if attention is not None else min(self._plan.inline_tau, MAX_ROWS)
        of_tau = [
            content_parts(rows, layer.weight, 3 * dim)
            for each in layers
            for layer in (each.reads, each.qkv)
            for rows in range(1, min(self._inline_tau, max_rows) + 1)
        ]
        self._content = floats(max([1, *of_tau]), max_rows, 2 * heads)
        self._router_weights = floats(max_rows, chosen)
        self._chosen = torch.empty(max_rows * chosen, dtype=torch.int32, device=device)
        if config.moe is not None:
            few = min(max_rows, MAX_TOKENS)
            self._router = RouterWorkspace(few, config.moe.num_experts, weight.dtype, device)
        if attention is None:
            sizes = {"max_rows": max_rows, "page_size": page_size}
            attention = PagedDecode(config, weight.dtype, device, early=self._early, **sizes)
        self._attention = attention

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        row_seq: Tensor,
        page_table: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        normed: Tensor | None,
    ) -> Tensor:
        """As `text.FusedText.decode`."""
        assert len(x) <= self._max_rows, f"{len(x)} rows, buffers for {self._max_rows}"
        rows = positions, row_seq, page_table
        u = _shaped(self._u, *x.shape)
        first = self._layers[0].ln
        layer_norm(x, first.weight, first.bias, pending=None, out=u)
        norms = [*(layer.ln for layer in self._layers[1:]), self._post_ln]
        for layer, norm in zip(self._layers, norms, strict=True):
            parts = self._block(layer, u, rows, keys[layer.index], values[layer.index])
            if norm is self._post_ln and normed is not None:
                u = normed
            # What waits for its predecessor in the stream doesn't wait for the other stream's.
            early = self._early and not self._is_apart(layer, len(x))
            add_layer_norm(x, parts, layer.owed, norm.weight, norm.bias, pdl=early, out=u)
        return x

    def _is_apart(self, layer: TextLayer, rows: int) -> bool:
        """Whether the layer's MLP runs beside its attention."""
        if layer.moe is None:
            return self._overlap
        return rows <= MAX_TOKENS and (self._overlap or rows <= self._plan.apart)

    def _block(
        self,
        layer: TextLayer,
        u: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
    ) -> list[Tensor]:
        """What the block adds to the stream but for its biases: parts whose sum it is."""
        dim, moe = self._config.dim, layer.moe
        apart = self._is_apart(layer, len(u))
        read = _shaped(self._read, len(u), layer.reads.weight.shape[0])
        # Attention's result takes the place of the values that it has read, each head's after the last look at them:
        # so it lies beside the MLP's in one operand.
        attended, hidden = read[:, 2 * dim : 3 * dim], read[:, 3 * dim :]
        pool = keys, values
        if apart:
            with self._beside():
                of_mlp = self._mlp(layer, u, hidden) if moe is None else self._experts(moe, u)
            factors = self._linear_and_tau(layer, u, layer.qkv, read[:, : 3 * dim])
            self._attention(read, *pool, rows, self._angles, factors, attended, layer.kv_scales)
            of_attention = self._partials(attended, layer.proj, self._written)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            return [of_attention, of_mlp]
        # The router's few rows ride along with qkv.
        gelu_from = 3 * dim if moe is None else None
        factors = self._linear_and_tau(layer, u, layer.reads, read, gelu_from=gelu_from)
        self._attention(read, *pool, rows, self._angles, factors, attended, layer.kv_scales)
        if moe is None:
            return [self._partials(read[:, 2 * dim :], layer.writes, self._written)]
        of_attention = self._partials(attended, layer.proj, self._written)
        return [of_attention, self._experts(moe, u, hidden)]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched inside runs on the side stream, where there is one, after all that was launched before."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _linear_and_tau(
        self,
        layer: TextLayer,
        u: Tensor,
        reads: Linear,
        out: Tensor,
        *,
        gelu_from: int | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Fills ``out`` with ``reads`` of ``u``, whose first columns are q, k and v; what attention needs of them for
        tau: raw content (or its parts) and alpha."""
        if layer.tau is None:
            self._linear(u, reads, out, gelu_from=gelu_from)
            return None
        rows, columns = len(u), 2 * self._config.n_heads
        if rows <= self._inline_tau:
            count = content_parts(rows, reads.weight, layer.tau.weights.shape[1])
            parts = _shaped(self._content, count, rows, columns)
            of_tau = layer.tau.weights, parts
            skinny_linear(
                u,
                reads.weight,
                reads.bias,
                gelu_from=gelu_from,
                tau=of_tau,
                pdl=self._early,
                out=out,
            )
            return parts, layer.tau.alpha
        self._linear(u, reads, out, gelu_from=gelu_from)
        assert self._tau is not None
        content = _shaped(self._content, rows, columns)
        tau_content(out, layer.tau.weights, self._tau, out=content)
        return content, layer.tau.alpha

    def _mlp(self, layer: TextLayer, u: Tensor, hidden: Tensor) -> Tensor:
        """Of a dense layer; ``hidden`` [M, ff] is filled."""
        assert layer.fc1 is not None and layer.fc2 is not None
        self._linear(u, layer.fc1, hidden, gelu_from=0, early=self._side is None)
        return self._partials(hidden, layer.fc2, self._of_mlp)

    def _experts(self, moe: Moe, u: Tensor, logits: Tensor | None = None) -> Tensor:
        """``logits`` [M, experts] of the router; None: computed here, as the first on a stream."""
        rows, k = len(u), moe.experts_per_token
        routed = _shaped(self._router_weights, rows, k), _shaped(self._chosen, rows, k)
        if logits is None:
            route_tokens(u, moe.router.weight, moe.router.bias, k, self._router, out=routed)
        else:
            route(logits, k, out=routed, pdl=self._early)
        if rows > MAX_TOKENS:
            return moe_prefill(u, *routed, moe.fc1, moe.fc2, moe.fc1_scale, moe.fc2_scale)
        out = _shaped(self._of_mlp, k, *u.shape)
        return moe_decode(
            u,
            *routed,
            moe.fc1,
            moe.fc2,
            moe.fc1_scale,
            moe.fc2_scale,
            out=out,
            pdl=self._early,
        )

    def _linear(
        self,
        x: Tensor,
        layer: Linear,
        out: Tensor,
        *,
        gelu_from: int | None = None,
        early: bool = True,
    ) -> None:
        if len(x) <= MAX_ROWS:
            early = early and self._early
            skinny_linear(x, layer.weight, layer.bias, gelu_from=gelu_from, pdl=early, out=out)
            return
        linear(x, layer, out=out)
        if gelu_from is not None:
            torch.ops.aten.gelu_(out[:, gelu_from:], approximate="tanh")

    def _partials(self, x: Tensor, weight: Tensor, room: Tensor) -> Tensor:
        """[S, M, dim] float32, or beyond `MAX_ROWS` rows [M, dim] in the model's type."""
        if len(x) > MAX_ROWS:
            return torch.mm(x, weight.T)
        shape = default_splits(*weight.shape), len(x), weight.shape[0]
        return skinny_partials(x, weight, pdl=self._early, out=_shaped(room, *shape))


def _writers(layers: list[TextLayer]) -> Iterator[Tensor]:
    for layer in layers:
        yield from (layer.proj, layer.writes)


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    """The beginning of a flat buffer."""
    return buffer[: math.prod(shape)].view(shape)
