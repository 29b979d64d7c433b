"""One decode step of the text decoder: a token a row, every launch and every buffer fixed by the number of rows.

A block is parallel, so it is at its shortest four launches: LayerNorm (which adds what the block before computed), one
GEMM for qkv and fc1, attention, and one GEMM for proj and fc2 whose partial sums the next LayerNorm adds. Experts of up
to 64 rows have a router of their own and run beside all of attention, on a second stream: then what one of the two
waits for costs nothing while the other reads its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ....kernels.attention.tau_content import TauWorkspace, tau_content
from ....kernels.layer_norm import add_layer_norm, layer_norm
from ....kernels.linear.skinny_linear import (
    MAX_ROWS,
    content_parts,
    default_splits,
    skinny_linear,
    skinny_partials,
)
from ....kernels.moe.decode import MAX_TOKENS, moe_decode
from ....kernels.moe.prefill import moe_prefill
from ....kernels.moe.route import route
from ....kernels.moe.router import RouterWorkspace, route_tokens
from ....models.layers import LayerNorm, Linear
from ....models.text import Moe
from ....types.model_config import TextConfig
from ..attention.decode import DecodeAttention, PagedDecode
from ..gemm import linear
from .layers import TextLayer

INLINE_TAU_ROWS = 64
"""Rows up to which the GEMM of qkv also leaves what tau attention needs of it, in parts that attention adds up, instead
of a launch between the two. More rows were not measured."""


class DecodePass:
    """Owns the buffers of a step of up to ``max_rows`` rows. Steps share them, so they run one after another.

    ``attention``: None takes our own kernel.
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
        pdl: bool,
        attention: DecodeAttention | None = None,
    ) -> None:
        self._config, self._layers, self._post_ln = config, layers, post_ln
        self._angles, self._tau = angles, tau
        weight = layers[0].proj
        device = weight.device
        # Where experts run beside attention.
        apart = config.moe is not None and weight.is_cuda
        self._side = torch.cuda.Stream(device) if apart else None
        self._early = pdl and weight.is_cuda
        self._max_rows = max_rows
        dim, heads = config.dim, config.n_heads
        widest = max(layer.reads.weight.shape[0] for layer in layers)
        chosen = config.moe.experts_per_token if config.moe else 1

        def floats(*shape: int) -> Tensor:
            return torch.empty(math.prod(shape), dtype=torch.float32, device=device)

        self._u = weight.new_empty(max_rows * dim)
        self._read = weight.new_empty(max_rows * widest)
        self._written = floats(
            max(default_splits(*w.shape) for w in _writers(layers)), max_rows, dim
        )
        self._of_experts = floats(chosen, min(max_rows, MAX_TOKENS), dim)
        # Other attention takes tau's content whole.
        self._inline_tau = INLINE_TAU_ROWS if attention is None else 0
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
        """Whether the layer's experts run beside its attention."""
        return layer.moe is not None and rows <= MAX_TOKENS

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
        read = _shaped(self._read, len(u), layer.reads.weight.shape[0])
        # Attention's result takes the place of the values that it has read, each head's after the last look at them:
        # so it lies beside the MLP's in one operand.
        attended, hidden = read[:, 2 * dim : 3 * dim], read[:, 3 * dim :]

        def attend(reads: Linear, *, gelu_from: int | None = None) -> None:
            out = read[:, : reads.weight.shape[0]]
            factors = self._linear_and_tau(layer, u, reads, out, gelu_from=gelu_from)
            pool = keys, values
            self._attention(read, *pool, rows, self._angles, factors, attended, layer.kv_scales)

        if moe is None:
            attend(layer.reads, gelu_from=3 * dim)
            return [self._partials(read[:, 2 * dim :], layer.writes)]
        if self._is_apart(layer, len(u)):
            with self._beside():
                of_experts = self._few_through_experts(moe, u)
            attend(layer.qkv)
            of_attention = self._partials(attended, layer.proj)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            return [of_attention, of_experts]
        # The router's few rows ride along with qkv.
        attend(layer.reads)
        return [self._partials(attended, layer.proj), self._many_through_experts(moe, u, hidden)]

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

    def _few_through_experts(self, moe: Moe, u: Tensor) -> Tensor:
        """Up to `MAX_TOKENS` rows, as the first on a stream -> parts [k, M, dim]."""
        rows, k = len(u), moe.experts_per_token
        routed = _shaped(self._router_weights, rows, k), _shaped(self._chosen, rows, k)
        route_tokens(u, moe.router.weight, moe.router.bias, k, self._router, out=routed)
        return moe_decode(
            u,
            *routed,
            moe.fc1,
            moe.fc2,
            moe.fc1_scale,
            moe.fc2_scale,
            out=_shaped(self._of_experts, k, *u.shape),
            pdl=self._early,
        )

    def _many_through_experts(self, moe: Moe, u: Tensor, logits: Tensor) -> Tensor:
        """[M, dim]; ``logits`` [M, experts] of the router."""
        rows, k = len(u), moe.experts_per_token
        routed = _shaped(self._router_weights, rows, k), _shaped(self._chosen, rows, k)
        route(logits, k, out=routed, pdl=self._early)
        return moe_prefill(u, *routed, moe.fc1, moe.fc2, moe.fc1_scale, moe.fc2_scale)

    def _linear(
        self,
        x: Tensor,
        layer: Linear,
        out: Tensor,
        *,
        gelu_from: int | None = None,
    ) -> None:
        if len(x) <= MAX_ROWS:
            pdl = self._early
            skinny_linear(x, layer.weight, layer.bias, gelu_from=gelu_from, pdl=pdl, out=out)
            return
        linear(x, layer, out=out)
        if gelu_from is not None:
            torch.ops.aten.gelu_(out[:, gelu_from:], approximate="tanh")

    def _partials(self, x: Tensor, weight: Tensor) -> Tensor:
        """[S, M, dim] float32, or beyond `MAX_ROWS` rows [M, dim] in the model's type."""
        if len(x) > MAX_ROWS:
            return torch.mm(x, weight.T)
        shape = default_splits(*weight.shape), len(x), weight.shape[0]
        return skinny_partials(x, weight, pdl=self._early, out=_shaped(self._written, *shape))


def _writers(layers: list[TextLayer]) -> Iterator[Tensor]:
    for layer in layers:
        yield from (layer.proj, layer.writes)


def _shaped(buffer: Tensor, *shape: int) -> Tensor:
    """The beginning of a flat buffer."""
    return buffer[: math.prod(shape)].view(shape)
