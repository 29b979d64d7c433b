"""One decode step of the text decoder: a token a row, every launch and every buffer fixed by the number of rows.

A block is parallel, so it is at its shortest four launches: LayerNorm (which adds what the block before computed), one
GEMM for qkv and fc1, attention, and one GEMM for proj and fc2 whose partial sums the next LayerNorm adds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...kernels.layer_norm import add_layer_norm, layer_norm
from ...kernels.moe_decode import MAX_TOKENS, moe_decode
from ...kernels.moe_prefill import moe_prefill
from ...kernels.moe_route import route
from ...kernels.skinny_linear import MAX_ROWS, default_splits, skinny_linear, skinny_partials
from ...kernels.tau_content import TauWorkspace, tau_content
from ...model_config import TextConfig
from ...models.layers import LayerNorm, Linear
from .decode_attention import DecodeAttention, PagedDecode
from .gemm import linear
from .text_layers import TextLayer

APART_ROWS = 8
"""Rows up to which experts run beside attention on a stream of their own: neither fills the card then."""


class DecodePass:
    """Owns the buffers of a step of up to ``max_rows`` rows. Steps share them, so they run one after another.

    ``overlap``: attention and MLP have GEMMs of their own, on two streams where there are streams. ``attention``: None
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
    ) -> None:
        self._config, self._layers, self._post_ln = config, layers, post_ln
        self._angles, self._tau, self._overlap = angles, tau, overlap
        weight = layers[0].proj
        device = weight.device
        beside = (overlap or config.moe is not None) and weight.is_cuda
        self._side = torch.cuda.Stream(device) if beside else None
        self._early = pdl and weight.is_cuda
        self._apart = False
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
        self._content = floats(max_rows, 2 * heads)
        self._router_weights = floats(max_rows, chosen)
        self._chosen = torch.empty(max_rows * chosen, dtype=torch.int32, device=device)
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
        few = self._config.moe is not None and len(x) <= APART_ROWS
        self._apart = self._side is not None and (self._overlap or few)
        u = _shaped(self._u, *x.shape)
        first = self._layers[0].ln
        layer_norm(x, first.weight, first.bias, pending=None, out=u)
        norms = [*(layer.ln for layer in self._layers[1:]), self._post_ln]
        for layer, norm in zip(self._layers, norms, strict=True):
            parts = self._block(layer, u, rows, keys[layer.index], values[layer.index])
            if norm is self._post_ln and normed is not None:
                u = normed
            # What waits for its predecessor in the stream doesn't wait for the other stream's.
            early = self._early and not self._apart
            add_layer_norm(x, parts, layer.owed, norm.weight, norm.bias, pdl=early, out=u)
        return x

    def _block(
        self,
        layer: TextLayer,
        u: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
    ) -> list[Tensor]:
        """What the block adds to the stream but for its biases: parts whose sum it is."""
        dim, dense = self._config.dim, layer.moe is None
        read = _shaped(self._read, len(u), layer.reads.weight.shape[0])
        # Attention's result takes the place of the values that it has read, each head's after the last look at them:
        # so it lies beside the MLP's in one operand.
        attended, hidden = read[:, 2 * dim : 3 * dim], read[:, 3 * dim :]
        if dense and not self._overlap:
            self._linear(u, layer.reads, read, gelu_from=3 * dim)
            self._attend(layer, read, rows, keys, values, attended)
            return [self._partials(read[:, 2 * dim :], layer.writes, self._written)]
        if not dense:
            # The router's few rows ride along with qkv.
            self._linear(u, layer.reads, read)
        # Of the two branches attention is the shorter, with few rows; it goes where starting costs more.
        with self._beside():
            if dense:
                self._linear(u, layer.qkv, read[:, : 3 * dim], early=not self._apart)
            self._attend(layer, read, rows, keys, values, attended)
            of_attention = self._partials(attended, layer.proj, self._written)
        of_mlp = self._mlp(layer, u, hidden)
        if self._apart:
            assert self._side is not None
            torch.cuda.current_stream().wait_stream(self._side)
        return [of_attention, of_mlp]

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """What is launched inside runs on the side stream, after all that was launched before."""
        if not self._apart:
            yield
            return
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _attend(
        self,
        layer: TextLayer,
        read: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        out: Tensor,
    ) -> None:
        factors = None
        if layer.tau is not None:
            assert self._tau is not None
            content = _shaped(self._content, len(read), 2 * self._config.n_heads)
            tau_content(read, layer.tau.weights, self._tau, out=content)
            factors = content, layer.tau.alpha
        self._attention(read, keys, values, rows, self._angles, factors, out)

    def _mlp(self, layer: TextLayer, u: Tensor, hidden: Tensor) -> Tensor:
        """``hidden`` [M, ff] is filled; of an MoE layer it holds the router's logits."""
        moe = layer.moe
        if moe is None:
            assert layer.fc1 is not None and layer.fc2 is not None
            self._linear(u, layer.fc1, hidden, gelu_from=0)
            return self._partials(hidden, layer.fc2, self._of_mlp)
        rows, k = len(u), moe.experts_per_token
        routed = _shaped(self._router_weights, rows, k), _shaped(self._chosen, rows, k)
        route(hidden, k, out=routed, pdl=self._early)
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
