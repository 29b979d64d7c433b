"""One decode step of the text decoder: one token a row. The number of rows determines all launches and buffers.

A block is parallel, so four launches are enough: the LayerNorm, which also adds the output of the previous block; one
GEMM for qkv and fc1; attention; and one GEMM for proj and fc2, whose partial sums the next LayerNorm adds. For up to 64
rows, experts have a separate router and run on a second stream, concurrently with attention.

With a few rows (`AHEAD_ROWS`), the router also computes the LayerNorm that it needs, so the experts of a layer wait for
the end of the layer before it only. The two streams then read and write the residual stream and the outputs of a layer
at the same time. So there are two buffers of each, which layers use in turn: a buffer is written again only after a
layer at whose end both streams met.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ....kernels.adapters.experts import ExpertChanges
from ....kernels.adapters.layer_norm import adapted_layer_norm
from ....kernels.attention.shared_prefix import SharedPrefixes
from ....kernels.attention.tau_content import TauWorkspace, tau_content
from ....kernels.layer_norm import add_layer_norm, layer_norm
from ....kernels.linear.skinny_linear import GemmChanges, skinny_linear, skinny_partials
from ....kernels.linear.skinny_tiling import MAX_ROWS, content_parts, splits_of
from ....kernels.moe.decode import MAX_TOKENS, moe_decode
from ....kernels.moe.prefill import moe_prefill
from ....kernels.moe.route import route
from ....kernels.moe.router import RouterWorkspace, add_norm_route, route_tokens
from ....models.layers import LayerNorm, Linear
from ....models.text import Moe
from ....types.model_config import TextConfig
from ..adapters.decode_changes import DecodeChanges
from ..adapters.pass_slabs import PassAdapters
from ..attention.decode import AttentionInputs, DecodeAttention, PagedDecode
from ..capture import rehearsed
from ..gemm import Fp8Linear, linear, wide
from ..streams import own_stream
from .layers import Fp8Products, TextLayer
from .options import TextOptions
from .step_buffers import NarrowWeights, StepBuffers, shaped

INLINE_TAU_ROWS = 64
"""The most rows for which the qkv GEMM also computes the tau content, as partial sums that attention adds up. This
saves a launch between the two. More rows were not measured."""


AHEAD_ROWS = range(2, 17)
"""The rows of a step whose router also computes the LayerNorm, once in each of its programs. One row gains nothing,
since its experts take no longer than the other stream."""


class DecodePass:
    """Owns the buffers of a step of up to ``max_rows`` rows. All steps share them, so they run one after the other.

    ``fp8``: the layers' weights in FP8; empty to use none. Steps of up to `MAX_ROWS` rows without adapters read them,
    with experts steps of up to `MAX_TOKENS` rows; the changes by adapters are not small beside the error of FP8. Such
    steps compute in float16, because widening e4m3 to it takes a third of the instructions that bfloat16 takes. The
    weights of tau and of the router stay in the model's dtype.
    """

    def __init__(
        self,
        config: TextConfig,
        layers: list[TextLayer],
        post_ln: LayerNorm,
        angles: tuple[Tensor, Tensor],
        options: TextOptions,
        fp8: Sequence[Fp8Products] = (),
    ) -> None:
        self._config, self._layers, self._post_ln = config, layers, post_ln
        self._angles = angles
        weight = layers[0].ln.weight
        device = weight.device
        # Experts run on this stream, concurrently with attention.
        concurrent = config.moe is not None and weight.is_cuda
        self._side = own_stream(device, priority=options.priority) if concurrent else None
        self._tau = TauWorkspace.allocate(2 * config.n_heads, device) if config.tau_attn else None
        self._early = options.pdl and weight.is_cuda
        self._max_rows = max_rows = options.max_rows
        dim, heads = config.dim, config.n_heads
        widest = _aligned(max(layer.reads.weight.shape[0] for layer in layers))
        chosen = config.moe.experts_per_token if config.moe else 1

        def floats(*shape: int) -> Tensor:
            return torch.empty(math.prod(shape), dtype=torch.float32, device=device)

        ahead = _most_ahead(max_rows)
        self._buffers = StepBuffers.allocate(weight, max_rows, dim, widest, ahead)
        self._fp8: NarrowWeights | None = None
        if fp8:
            half = weight.new_empty(0, dtype=torch.float16)
            few = min(max_rows, MAX_ROWS if config.moe is None else MAX_TOKENS)
            buffers = StepBuffers.allocate(half, few, dim, widest, _most_ahead(few))
            self._fp8 = NarrowWeights(fp8, few, buffers)
        weights = [*_output_weights(layers), *(each.writes.weight for each in fp8 if each.writes)]
        splits = max(map(splits_of, weights))
        # Two buffers each. A step whose experts do not begin ahead uses the first.
        self._partial_sums = floats(splits, max_rows, dim), floats(splits, ahead, dim)
        self._expert_outputs = (
            floats(chosen, min(max_rows, MAX_TOKENS), dim),
            floats(chosen, ahead, dim),
        )
        self._stream = weight.new_empty(ahead * dim)
        # FlashInfer's attention does not add up partial tau content.
        self._inline_tau = INLINE_TAU_ROWS if options.attention is None else 0
        inputs = [
            *(linear.weight for each in layers for linear in (each.reads, each.qkv)),
            *(each.reads.weight for each in fp8),
        ]
        tau_parts = [
            content_parts(rows, weight, 3 * dim)
            for weight in inputs
            for rows in range(1, min(self._inline_tau, max_rows) + 1)
        ]
        self._content = floats(max([1, *tau_parts]), max_rows, 2 * heads)
        self._changes: DecodeChanges | None = None
        if options.adapters is not None:
            self._changes = DecodeChanges(options.adapters, layers, max_rows, device)
        self._router_weights = floats(max_rows, chosen)
        self._chosen = torch.empty(max_rows * chosen, dtype=torch.int32, device=device)
        if config.moe is not None:
            few = min(max_rows, MAX_TOKENS)
            self._router = RouterWorkspace(few, config.moe.num_experts, weight.dtype, device)
        self._attention: DecodeAttention = options.attention or PagedDecode(
            config,
            weight.dtype,
            device,
            max_rows=max_rows,
            page_size=options.page_size,
            early=self._early,
        )

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        row_seq: Tensor,
        page_table: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        normed: Tensor | None = None,
        shared: SharedPrefixes | None = None,
        adapters: PassAdapters | None = None,
    ) -> Tensor:
        """Runs one token of each row: overwrites ``x`` [M, dim] with the stream after the last block, and returns it.

        ``positions``: [M] int32, the positions of the tokens. ``row_seq``: [M] int32, the row of each token's sequence
        in ``page_table`` [num_seqs, max_pages] int32. ``keys``, ``values``: as for `FusedText.prefill`. ``normed``: [M,
        dim], filled with ``post_ln`` of the stream at no cost, for `FusedText.logits`. ``shared``: as for
        `paged_decode`. ``adapters``: those of the rows. A graph can capture this pass, because the grids depend on M
        only and all memory is allocated before.
        """
        assert len(x) <= self._max_rows, f"{len(x)} rows, buffers for {self._max_rows}"
        rows = positions, row_seq, page_table
        fp8 = self._fp8 if adapters is None else None
        if fp8 is not None and len(x) > fp8.max_rows:
            fp8 = None
        buffers = self._buffers if fp8 is None else fp8.buffers
        u = shaped(buffers.u, *x.shape)
        layers = rehearsed(self._layers, TextLayer.has_experts)
        first = layers[0].ln
        changes = self._changes
        assert adapters is None or changes is not None, "this runtime computes no adapters"
        if adapters is None or changes is None:
            layer_norm(x, first.weight, first.bias, pending=None, out=u)
        else:
            shrunk = changes.before(layers[0], adapters)
            adapted_layer_norm(x, (), None, first.weight, first.bias, shrunk=shrunk, out=u)
        norms = [*(layer.ln for layer in layers[1:]), self._post_ln]
        followings = [*layers[1:], None]
        ahead = adapters is None and self._is_ahead(len(x))
        # The residual stream before the layer. Its last LayerNorm writes to x.
        stream, expert_output = x, None
        for number, (layer, norm, following) in enumerate(
            zip(layers, norms, followings, strict=True)
        ):
            turn = number % 2 if ahead else 0
            pool = keys[layer.index], values[layer.index]
            columns = layer.reads.weight.shape[0]
            read = shaped(buffers.read, len(x), _aligned(columns))[:, :columns]
            narrow = None if fp8 is None else fp8.layers[layer.index]
            parts = self._block(
                layer, u, read, rows, pool, shared, adapters, narrow, turn, expert_output
            )
            block_input = u
            if norm is self._post_ln and normed is not None:
                u = normed
            # An early launch waits for its predecessor in the same stream, but not for kernels of the other stream.
            early = self._early and not self._is_concurrent(layer, len(x))
            summand = stream, parts, layer.output_bias, norm.weight, norm.bias
            if adapters is None or changes is None:
                expert_output = None
                if ahead and following is not None and following.moe is not None:
                    routed = shaped(buffers.routed, *x.shape)
                    expert_output = self._experts_ahead(following.moe, summand, routed, 1 - turn)
                after = x if expert_output is None else self._other_stream(x, stream)
                add_layer_norm(*summand, pdl=early, stream=after, out=u)
                stream = after
                continue
            attended, _ = self._attended_and_hidden(read)
            adapted_layer_norm(
                *summand,
                summed=changes.after_mlp(layer, adapters),
                whole=changes.after_attention(layer, adapters, attended, block_input),
                shrunk=changes.before(following, adapters),
                pdl=early,
                out=u,
            )
        return x

    def _is_concurrent(self, layer: TextLayer, rows: int) -> bool:
        """Returns whether the layer's experts run concurrently with its attention."""
        return layer.moe is not None and rows <= MAX_TOKENS

    def _is_ahead(self, rows: int) -> bool:
        """Returns whether the experts of a layer begin beside the LayerNorm in front of it."""
        return self._config.moe is not None and rows in AHEAD_ROWS and rows <= MAX_TOKENS

    def _other_stream(self, x: Tensor, stream: Tensor) -> Tensor:
        """Returns the one of the two buffers of the residual stream, ``x`` and one of its shape, that is not
        ``stream``."""
        return shaped(self._stream, *x.shape) if stream is x else x

    def _experts_ahead(
        self,
        moe: Moe,
        summand: tuple[Tensor, list[Tensor], Tensor | None, Tensor, Tensor],
        routed: Tensor,
        turn: int,
    ) -> Tensor:
        """Starts the experts of the next layer on the second stream and returns their outputs [k, M, dim].

        ``summand``: the first arguments of the LayerNorm in front of them. ``routed``: [M, dim], for its result.
        """
        rows, k = len(routed), moe.experts_per_token
        weights_and_experts = self._routing(rows, k)
        with self._on_side_stream():
            add_norm_route(
                *summand,
                moe.router.weight,
                moe.router.bias,
                k,
                self._router,
                u=routed,
                out=weights_and_experts,
            )
            return self._experts(moe, routed, weights_and_experts, None, turn)

    def _block(
        self,
        layer: TextLayer,
        u: Tensor,
        read: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        shared: SharedPrefixes | None,
        adapters: PassAdapters | None,
        narrow: Fp8Products | None,
        turn: int,
        expert_output: Tensor | None,
    ) -> list[Tensor]:
        """Returns tensors whose sum is the block's output, without its biases.

        ``read``: for the result of the first GEMM. ``narrow``: the weights in FP8, if the step reads them. ``turn``:
        which of two buffers takes the output. ``expert_output``: that of experts which have begun.
        """
        dim, moe = self._config.dim, layer.moe
        attended, hidden = self._attended_and_hidden(read)

        def attend(reads: Linear | Fp8Linear, *, gelu_from: int | None = None) -> None:
            out = read[:, : reads.weight.shape[0]]
            factors = self._linear_and_tau(layer, u, reads, out, adapters, gelu_from=gelu_from)
            self._attention(
                AttentionInputs(
                    read, pool, rows, self._angles, factors, attended, layer.kv_scales, shared
                )
            )

        if moe is None:
            attend(layer.reads if narrow is None else narrow.reads, gelu_from=3 * dim)
            writes = layer.writes if narrow is None else narrow.writes
            assert writes is not None
            output = self._partials(read[:, 2 * dim :], writes, turn)
            if adapters is not None and self._changes is not None and len(u) > MAX_ROWS:
                self._changes.add_mlp(layer, adapters, hidden, output)
            return [output]
        experts = None if self._changes is None else self._changes.experts(layer, adapters)
        if self._is_concurrent(layer, len(u)):
            if expert_output is None:
                with self._on_side_stream():
                    expert_output = self._experts_of_few(moe, u, experts, turn)
            attend(layer.qkv if narrow is None else narrow.qkv)
            proj = layer.proj if narrow is None else narrow.writes
            assert proj is not None
            attention_output = self._partials(attended, proj, turn)
            if self._side is not None:
                torch.cuda.current_stream().wait_stream(self._side)
            return [attention_output, expert_output]
        # One GEMM computes qkv and the router's logits, unless only qkv is in 4 bits.
        attend(layer.reads)
        logits = hidden if hidden.shape[1] else linear(u, moe.router)
        return [
            self._partials(attended, layer.proj, turn),
            self._experts_of_many(moe, u, logits, experts),
        ]

    def _attended_and_hidden(self, read: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output of attention [M, dim] and what follows it in the result of the layer's first GEMM.

        Attention overwrites the values v with its output, each head after its last read. So the output is next to the
        MLP's hidden layer, and both form one operand.
        """
        dim = self._config.dim
        return read[:, 2 * dim : 3 * dim], read[:, 3 * dim :]

    @contextmanager
    def _on_side_stream(self) -> Iterator[None]:
        """Launches inside the context run on the side stream, if there is one, after all earlier launches."""
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
        reads: Linear | Fp8Linear,
        out: Tensor,
        adapters: PassAdapters | None,
        *,
        gelu_from: int | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Writes ``reads`` of ``u`` to ``out``, whose first columns are q, k and v.

        Returns tau's raw content (or its partial sums) and alpha, or None without tau attention.
        """
        if layer.tau is None:
            self._linear(layer, u, reads, out, adapters, gelu_from=gelu_from)
            return None
        rows, columns = len(u), 2 * self._config.n_heads
        if rows <= self._inline_tau:
            count = content_parts(rows, reads.weight, layer.tau.weights.shape[1])
            parts = shaped(self._content, count, rows, columns)
            weights_and_parts = layer.tau.weights, parts
            skinny_linear(
                u,
                reads.weight,
                reads.bias,
                scales=_scales(reads),
                gelu_from=gelu_from,
                tau=weights_and_parts,
                adapted=self._adapted(layer, adapters, hidden=gelu_from is not None),
                pdl=self._early,
                out=out,
            )
            return parts, layer.tau.alpha
        self._linear(layer, u, reads, out, adapters, gelu_from=gelu_from)
        assert self._tau is not None
        content = shaped(self._content, rows, columns)
        tau_content(out, layer.tau.weights, self._tau, out=content)
        return content, layer.tau.alpha

    def _routing(self, rows: int, k: int) -> tuple[Tensor, Tensor]:
        """Returns the buffers of the experts' weights and numbers [M, k]."""
        return shaped(self._router_weights, rows, k), shaped(self._chosen, rows, k)

    def _experts_of_few(
        self, moe: Moe, u: Tensor, adapters: ExpertChanges | None, turn: int
    ) -> Tensor:
        """Routes up to `MAX_TOKENS` rows [M, dim]. Returns the experts' outputs [k, M, dim]; their sum is the MLP's."""
        routing = self._routing(len(u), moe.experts_per_token)
        k = moe.experts_per_token
        route_tokens(u, moe.router.weight, moe.router.bias, k, self._router, out=routing)
        return self._experts(moe, u, routing, adapters, turn)

    def _experts(
        self,
        moe: Moe,
        u: Tensor,
        routing: tuple[Tensor, Tensor],
        adapters: ExpertChanges | None,
        turn: int,
    ) -> Tensor:
        return moe_decode(
            u,
            *routing,
            moe.fc1,
            moe.fc2,
            moe.fc1_scale,
            moe.fc2_scale,
            out=shaped(self._expert_outputs[turn], moe.experts_per_token, *u.shape),
            adapters=adapters,
            pdl=self._early,
        )

    def _experts_of_many(
        self, moe: Moe, u: Tensor, logits: Tensor, adapters: ExpertChanges | None
    ) -> Tensor:
        """Returns the MLP's output [M, dim]. ``logits``: [M, experts], the router's."""
        rows, k = len(u), moe.experts_per_token
        routing = self._routing(rows, k)
        route(logits, k, out=routing, pdl=self._early)
        return moe_prefill(
            u, *routing, moe.fc1, moe.fc2, moe.fc1_scale, moe.fc2_scale, adapters=adapters
        )

    def _linear(
        self,
        layer: TextLayer,
        x: Tensor,
        reads: Linear | Fp8Linear,
        out: Tensor,
        adapters: PassAdapters | None,
        *,
        gelu_from: int | None = None,
    ) -> None:
        if len(x) <= MAX_ROWS:
            adapted = self._adapted(layer, adapters, hidden=gelu_from is not None)
            skinny_linear(
                x,
                reads.weight,
                reads.bias,
                scales=_scales(reads),
                gelu_from=gelu_from,
                adapted=adapted,
                pdl=self._early,
                out=out,
            )
            return
        assert isinstance(reads, Linear), "FP8 is for few rows"
        linear(x, reads, out=out)
        if adapters is not None and self._changes is not None:
            hidden = gelu_from is not None
            self._changes.add_first(layer, adapters, x, out, hidden=hidden)
        elif gelu_from is not None:
            torch.ops.aten.gelu_(out[:, gelu_from:], approximate="tanh")

    def _adapted(
        self, layer: TextLayer, adapters: PassAdapters | None, *, hidden: bool
    ) -> GemmChanges | None:
        if adapters is None or self._changes is None:
            return None
        return self._changes.within(layer, adapters, hidden=hidden)

    def _partials(self, x: Tensor, writes: Linear | Fp8Linear, turn: int) -> Tensor:
        """Returns ``x @ writes.T`` as partial sums [S, M, dim] float32, or as [M, dim] beyond `MAX_ROWS` rows."""
        weight, scales = writes.weight, _scales(writes)
        if len(x) > MAX_ROWS:
            assert isinstance(writes, Linear), "FP8 is for few rows"
            return torch.mm(x, wide(writes, x.dtype).T)
        out = shaped(self._partial_sums[turn], splits_of(weight), len(x), weight.shape[0])
        return skinny_partials(x, weight, scales=scales, pdl=self._early, out=out)


def _aligned(columns: int) -> int:
    """Columns that begin each row of half precision at a multiple of 16 bytes, as FlashInfer reads queries."""
    return -(-columns // 8) * 8


def _most_ahead(max_rows: int) -> int:
    """Returns the most rows of a step whose experts begin ahead, if a step has at most ``max_rows``."""
    return max((rows for rows in AHEAD_ROWS if rows <= max_rows), default=0)


def _scales(layer: Linear | Fp8Linear) -> Tensor | None:
    return layer.scales if isinstance(layer, Fp8Linear) else layer.scale


def _output_weights(layers: list[TextLayer]) -> Iterator[Tensor]:
    for layer in layers:
        yield from (layer.proj.weight, layer.writes.weight)
