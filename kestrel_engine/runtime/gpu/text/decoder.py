"""The text decoder in few launches. It computes the same as `models.text.TextModel`, for prefill and for decode.

It works on a flat batch of tokens and the paged KV cache. Both passes overwrite their input, the residual stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.adapters.rows import change_rows
from ....kernels.attention.rope_store import rope_store
from ....kernels.attention.tau_content import TauWorkspace, tau_content
from ....kernels.layer_norm import layer_norm
from ....kernels.linear.fp8_rows import Fp8Rows, layer_norm_fp8, quantise_rows
from ....kernels.linear.skinny_linear import skinny_linear
from ....kernels.moe.prefill import moe_prefill
from ....kernels.moe.route import route
from ....models.layers import LayerNorm, Linear, Tensors
from ....types.model_config import TextConfig
from ..adapters.decode_changes import expert_changes
from ..adapters.layout import BlockPlaces
from ..adapters.pass_slabs import PassAdapters
from ..attention.decode import DecodeAttention
from ..capture import rehearsed
from ..gemm import add_linear, linear, linear_gelu, require_exact, wide
from .decode_step import DecodePass
from .layers import Fp8Products, TextLayer, load_layers, rotary_angles
from .options import TextOptions

SKINNY_LOGITS = 32
"""The most rows for which our own kernel computes the vocabulary head. For more rows, cuBLAS is faster."""


class TokenAttention(Protocol):
    """Attention of one prefill pass, after its keys and values are stored in the KV cache."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> object:
        """Writes the attention output to ``out`` [T, dim].

        ``q``, ``k``, ``v``: [T, heads, head_dim], rotated, with any row stride.
        """
        ...


class FusedText:
    """The text decoder.

    ``tensors``: a packed checkpoint (`weights.pack_weights`), in the dtype and on the device of the computation;
    experts may be in FP8. Raises ConfigError for shapes that do not support FP8.
    """

    def __init__(self, config: TextConfig, tensors: Tensors, options: TextOptions) -> None:
        self.config, self._options = config, options
        self.layers, self._pending = load_layers(config, tensors, options.kv_scales)
        self.fp8_products = [
            Fp8Products.of(layer, decode=options.fp8_decode) for layer in self.layers if options.fp8
        ]
        self._post_ln = LayerNorm.load(tensors, "text.post_ln")
        self._lm_head = Linear.load(tensors, "text.lm_head")
        require_exact(self._lm_head.weight.dtype)
        device = self._pending.device
        self._early = options.pdl and device.type == "cuda"
        self._cos, self._sin = rotary_angles(config, device)
        self._tau = TauWorkspace.allocate(2 * config.n_heads, device) if config.tau_attn else None
        # FlashInfer's attention reads keys and queries of one dtype.
        self.decode = self._pass(options, narrow=options.attention is None)
        """The pass of decode steps."""

    @property
    def early(self) -> bool:
        """Whether kernels are launched before the preceding kernels have ended."""
        return self._early

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self._lm_head.weight.dtype

    def prefill(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: TokenAttention,
        keys: Tensor,
        values: Tensor,
        *,
        rows: Tensor | None = None,
        adapters: PassAdapters | None = None,
    ) -> Tensor:
        """Returns the residual stream after the last block, before ``post_ln``: [T, dim], or only its ``rows`` [n]
        int64.

        ``x``: [T, dim], which is overwritten. ``positions``, ``slots``: [T] int64. ``keys``, ``values``: the KV cache,
        [layers, num_slots, heads, head_dim]. ``adapters``: those of the tokens. With them, the pass is not computed in
        FP8, because their changes are not small beside its errors.
        """
        fp8 = self.fp8_products if adapters is None else []
        # Attention does not write rows of padding, so they must be initialised with numbers.
        u, attended = torch.empty_like(x), torch.zeros_like(x)
        heads = self.config.n_heads
        # The output of a block in FP8 that is not yet added to the stream.
        late_output: Tensor | None = None
        layers = rehearsed(self.layers, TextLayer.has_experts)
        for layer in layers:
            u8: Fp8Rows | None = None
            if fp8:
                # The router of an MoE layer reads the LayerNorm, too.
                norm = None if layer.moe is None else u
                pending, add = layer.pending, late_output
                u8 = layer_norm_fp8(
                    x, layer.ln.weight, layer.ln.bias, pending=pending, add=add, out=norm
                )
                qkv = fp8[layer.index].qkv(u8)
            else:
                layer_norm(x, layer.ln.weight, layer.ln.bias, pending=layer.pending, out=u)
                qkv = linear(u, layer.qkv)
            if adapters is not None and adapters.attention is not None:
                change_rows(u, adapters.attention, *self._places(layer).qkv[:2], add_to=qkv)
            pool = keys[layer.index], values[layer.index]
            tau = self._factors(layer, qkv)
            angles, scales = (self._cos, self._sin), layer.kv_scales
            rope_store(qkv, positions, slots, *pool, *angles, tau=tau, scales=scales)
            q, k, v = qkv.view(len(x), 3, heads, -1).unbind(1)
            attention(layer.index, q, k, v, attended)
            if rows is not None and layer is layers[-1]:
                # All keys and values are stored. The rest of the last layer needs these rows only.
                x, u, attended = x[rows], u[rows], attended[rows]
                u8 = None if u8 is None else u8.at(rows)
                adapters = None if adapters is None else adapters.at(rows)
            if layer.moe is None and u8 is not None:
                late_output = self._output_in_fp8(layer, attended, u8)
                continue
            late_output = None
            add_linear(x, attended, wide(layer.proj, x.dtype))
            if adapters is not None and adapters.attention is not None:
                change_rows(attended, adapters.attention, *self._places(layer).proj[:2], add_to=x)
            if adapters is not None and adapters.proj_input is not None:
                place = self._places(layer).proj_input
                change_rows(u, adapters.proj_input, *place[:2], add_to=x)
            self._add_mlp(layer, x, u, u8, adapters)
        if late_output is not None:
            x.add_(late_output)
        # The sum is rounded once: torch adds a float32 tensor in place to a half-precision one in float32.
        return x.add_(self._pending)

    def _places(self, layer: TextLayer) -> BlockPlaces:
        layout = self._options.adapters
        assert layout is not None, "this runtime computes no adapters"
        return layout.blocks[layer.index]

    def _factors(self, layer: TextLayer, qkv: Tensor) -> tuple[Tensor, Tensor] | None:
        if layer.tau is None:
            return None
        assert self._tau is not None
        return tau_content(qkv, layer.tau.weights, self._tau), layer.tau.alpha

    def _output_in_fp8(self, layer: TextLayer, attended: Tensor, u8: Fp8Rows) -> Tensor:
        """Returns the output of a dense block, the sum of its attention and its MLP."""
        fp8 = self.fp8_products[layer.index]
        assert fp8.fc1 is not None and fp8.writes is not None
        return fp8.writes(quantise_rows(fp8.fc1(u8), gelu=True, left=attended))

    def _add_mlp(
        self,
        layer: TextLayer,
        x: Tensor,
        u: Tensor,
        u8: Fp8Rows | None,
        adapters: PassAdapters | None,
    ) -> None:
        """Adds the MLP of ``u`` to ``x``. ``u8``: ``u`` in FP8, for experts with FP8 inputs."""
        moe = layer.moe
        if moe is None and adapters is not None:
            assert layer.fc1 is not None and layer.fc2 is not None
            block, hidden = self._places(layer), linear(u, layer.fc1)
            change_rows(u, adapters.mlp, *block.fc1[:2], add_to=hidden, gelu=True)
            add_linear(x, hidden, wide(layer.fc2, x.dtype))
            change_rows(hidden, adapters.mlp, *block.fc2[:2], add_to=x)
            return
        if moe is None:
            assert layer.fc1 is not None and layer.fc2 is not None
            add_linear(x, linear_gelu(u, layer.fc1), wide(layer.fc2, x.dtype))
            return
        weights, experts = route(linear(u, moe.router), moe.experts_per_token)
        moe_prefill(
            u,
            weights,
            experts,
            moe.fc1,
            moe.fc2,
            moe.fc1_scale,
            moe.fc2_scale,
            add_to=x,
            out=x,
            in_fp8=u8,
            adapters=None if adapters is None else expert_changes(self._places(layer), adapters),
        )

    def few_tokens(
        self, attention: DecodeAttention, *, max_rows: int, page_size: int
    ) -> DecodePass:
        """Returns a pass of its own buffers for up to ``max_rows`` prompt tokens, in the launches of a decode step.

        ``attention``: stores the keys and values of all rows, then attends.
        """
        return self._pass(
            replace(
                self._options,
                attention=attention,
                max_rows=max_rows,
                page_size=page_size,
                priority=0,
            )
        )

    def _pass(self, options: TextOptions, *, narrow: bool = True) -> DecodePass:
        fp8 = self.fp8_products if options.fp8_decode and narrow else ()
        angles = self._cos, self._sin
        return DecodePass(self.config, self.layers, self._post_ln, angles, options, fp8)

    def logits(
        self, hidden: Tensor, *, normed: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns the logits [n, vocab], in the model's dtype, of ``hidden`` [n, dim], the residual stream.

        ``normed``: ``post_ln`` of ``hidden``, if the caller has it. ``out``: where to write them; None to allocate.
        """
        if normed is None:
            normed = layer_norm(hidden, self._post_ln.weight, self._post_ln.bias, pending=None)
        if len(normed) <= SKINNY_LOGITS:
            weight, bias = self._lm_head.weight, self._lm_head.bias
            return skinny_linear(normed, weight, bias, pdl=self._early, out=out)
        return linear(normed, self._lm_head, out=out)
