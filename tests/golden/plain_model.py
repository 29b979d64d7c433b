"""A plain Moondream: the text decoder and the region model of moondream.md, sections 6 and 7, over a whole prompt at
once. No cache, no pages, no batch, and no code of the engine.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.requests import Coord, Token


class PlainModel:
    """``tensors``: the checkpoint's, by canonical name, in float32."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self._config, self._tensors = config, tensors

    def point(self, image: Tensor, prompt: Sequence[Token]) -> tuple[float, float] | None:
        """The first point after BOS, an image and ``prompt``; None: the end comes first. ``image``: its embedding
        [positions, dim]."""
        hidden = self._hidden(image, prompt)
        if int(self._logits(hidden).argmax()) == self._config.ids.eos_id:
            return None
        across = self._coordinate(hidden)
        return across, self._coordinate(self._hidden(image, [*prompt, Coord(across)]))

    def margin(self, image: Tensor, prompt: Sequence[Token]) -> float:
        """How far the logit of the end is below the largest one."""
        logits = self._logits(self._hidden(image, prompt))
        return float(logits.max() - logits[self._config.ids.eos_id])

    def _embed(self, tokens: Sequence[Token]) -> Tensor:
        rows = []
        for token in tokens:
            if isinstance(token, Coord):
                angles = 2 * math.pi * token.value * self._tensors["region.coord_features"][0]
                waves = torch.cat([angles.cos(), angles.sin()])
                rows.append(self._linear("region.coord_encoder", waves))
            else:
                rows.append(self._tensors["text.wte"][token])
        return torch.stack(rows)

    def _hidden(self, image: Tensor, prompt: Sequence[Token]) -> Tensor:
        """The residual stream of the last position [dim]. BOS and the image attend to one another."""
        x = torch.cat([self._embed([self._config.ids.bos_id]), image, self._embed(prompt)])
        prefix, count = 1 + len(image), len(x)
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        seen[:prefix, :prefix] = True
        for index in range(self._config.text.n_layers):
            name = f"text.blocks.{index}"
            u = self._norm(f"{name}.ln", x)
            x = x + self._attention(f"{name}.attn", u, seen) + self._mlp(f"{name}.mlp", u)
        return x[-1]

    def _attention(self, name: str, u: Tensor, seen: Tensor) -> Tensor:
        count, heads = len(u), self._config.text.n_heads
        joined = self._linear(f"{name}.qkv", u)
        q, k, v = (part.view(count, heads, -1) for part in joined.chunk(3, dim=-1))
        if f"{name}.tau.wq" in self._tensors:
            f, positions = F.gelu(joined), torch.arange(1, count + 1).log()[:, None]
            grown = 0.5 + torch.sigmoid(self._tensors[f"{name}.tau.alpha"] * positions)
            q = q * (torch.tanh(f @ self._tensors[f"{name}.tau.wq"].T) + grown)[..., None]
            v = v * (torch.tanh(f @ self._tensors[f"{name}.tau.wv"].T) + grown)[..., None]
        q, k = self._turned(q), self._turned(k)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
        return self._linear(f"{name}.proj", torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def _turned(self, x: Tensor) -> Tensor:
        half = self._config.text.rotary_dim // 2
        steps = self._config.text.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None] * steps
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    def _mlp(self, name: str, u: Tensor) -> Tensor:
        if f"{name}.router.weight" not in self._tensors:
            return self._dense(name, u)
        assert self._config.text.moe is not None
        logits, count = self._linear(f"{name}.router", u), self._config.text.moe.experts_per_token
        largest, chosen = logits.topk(count)
        shares = torch.zeros_like(logits).scatter(1, chosen, largest.softmax(dim=-1))
        first, second = (self._tensors[f"{name}.{part}.weight"] for part in ("fc1", "fc2"))
        total = torch.zeros_like(u)
        for expert in range(len(first)):
            h, g = (u @ first[expert].T).chunk(2, dim=-1)
            total += shares[:, expert, None] * ((F.gelu(h) * (g + 1)) @ second[expert].T)
        return total

    def _coordinate(self, hidden: Tensor) -> float:
        name = "region.coord_decoder"
        if f"{name}.weight" in self._tensors:
            logits = self._linear(name, self._norm("region.ln", hidden))
        else:
            logits = self._dense(name, hidden)
        return int(logits.argmax()) / len(logits)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._linear("text.lm_head", self._norm("text.post_ln", hidden))

    def _dense(self, name: str, u: Tensor) -> Tensor:
        return self._linear(
            f"{name}.fc2", F.gelu(self._linear(f"{name}.fc1", u), approximate="tanh")
        )

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, 1e-5)
