"""The Moondream 3 architecture at small size, for training and as a plain float32 reference.

Parameter names are those of the released checkpoints without the leading "model.". This module has the training path
(packed prompts, experts computed densely) and a plain forward pass without a cache. The engine serves the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.scenes.tiling import TINY, Geometry, View


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; by default those of kestrel-tiny. Layers below ``moe_start`` are dense."""

    dim: int = 256
    ff_dim: int = 1024
    layers: int = 6
    heads: int = 4
    vocab: int = 768
    max_context: int = 2048
    rope_theta: float = 10_000.0
    rotary: int = 32
    moe_start: int = 1
    experts: int = 8
    experts_per_token: int = 2
    expert_inner: int = 128
    vision_dim: int = 192
    vision_layers: int = 6
    vision_heads: int = 3
    vision_ff: int = 768
    proj_inner: int = 1024
    coord_features: int = 64
    size_features: int = 128
    bins: int = 1024
    view: Geometry = TINY

    def as_json(self) -> dict[str, dict[str, object]]:
        """The text, vision and region parts of config.json."""
        return {
            "text": {
                "dim": self.dim,
                "ff_dim": self.ff_dim,
                "n_layers": self.layers,
                "vocab_size": self.vocab,
                "max_context": self.max_context,
                "n_heads": self.heads,
                "n_kv_heads": self.heads,
                "prefix_attn": self.view.prefix,
                "group_size": None,
                "moe": {
                    "num_experts": self.experts,
                    "start_layer": self.moe_start,
                    "experts_per_token": self.experts_per_token,
                    "expert_inner_dim": self.expert_inner,
                },
                "tau_attn": True,
                "rope_theta": self.rope_theta,
            },
            "vision": {
                "enc_dim": self.vision_dim,
                "enc_patch_size": self.view.patch,
                "enc_n_layers": self.vision_layers,
                "enc_ff_dim": self.vision_ff,
                "enc_n_heads": self.vision_heads,
                "proj_out_dim": self.dim,
                "crop_size": self.view.crop,
                "in_channels": 3,
                "max_crops": self.view.max_crops,
                "overlap_margin": self.view.margin,
                "proj_inner_dim": self.proj_inner,
            },
            "region": {
                "dim": self.dim,
                "coord_feat_dim": self.coord_features,
                "coord_out_dim": self.bins,
                "size_feat_dim": self.size_features,
                "size_out_dim": 2 * self.bins,
            },
        }


class VisionAttention(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.heads = c.vision_heads
        self.qkv = nn.Linear(c.vision_dim, 3 * c.vision_dim)
        self.proj = nn.Linear(c.vision_dim, c.vision_dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = self.proj(out.transpose(1, 2).reshape(n, length, dim))
        return mixed


class Mlp(nn.Module):
    def __init__(self, dim: int, inner: int, out: int | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, inner)
        self.fc2 = nn.Linear(inner, out or dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class VisionBlock(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(c.vision_dim)
        self.ln2 = nn.LayerNorm(c.vision_dim)
        self.attn = VisionAttention(c)
        self.mlp = Mlp(c.vision_dim, c.vision_ff)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        x = x + self.mlp(self.ln2(x))
        return x


def sincos_positions(dim: int, grid: int) -> Tensor:
    """Initial position embeddings [1, grid * grid, dim]: a quarter each of sin and cos for y and x."""
    frequency = 1.0 / 100 ** (torch.arange(dim // 4) / (dim // 4))
    at = torch.arange(grid).view(-1, 1) * frequency
    y = torch.cat((at.sin(), at.cos()), 1).view(grid, 1, -1).expand(grid, grid, -1)
    x = torch.cat((at.sin(), at.cos()), 1).view(1, grid, -1).expand(grid, grid, -1)
    return torch.cat((y, x), -1).reshape(1, grid * grid, dim) * 0.5


def pool_matrix(size: int, grid: int = TINY.grid) -> Tensor:
    """Adaptive average pooling of one axis as a matrix [grid, size]."""
    m = torch.zeros(grid, size)
    for k in range(grid):
        a, b = k * size // grid, -((k + 1) * size // -grid)
        m[k, a:b] = 1 / (b - a)
    return m


class Vision(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.grid, self.patch = c.view.grid, c.view.patch
        self.patch_emb = nn.Linear(c.view.patch**2 * 3, c.vision_dim)
        self.pos_emb = nn.Parameter(sincos_positions(c.vision_dim, c.view.grid))
        self.blocks = nn.ModuleList(VisionBlock(c) for _ in range(c.vision_layers))
        self.post_ln = nn.LayerNorm(c.vision_dim)
        self.proj_mlp = Mlp(2 * c.vision_dim, c.proj_inner, c.dim)

    def encode(self, pixels: Tensor) -> Tensor:
        """Normalised crops [n, 3, crop, crop] -> features [n, patches, vision_dim]."""
        n, grid, patch = pixels.shape[0], self.grid, self.patch
        patches = pixels.view(n, 3, grid, patch, grid, patch).permute(0, 2, 4, 1, 3, 5)
        x = self.patch_emb(patches.reshape(n, grid * grid, 3 * patch * patch)) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.post_ln(x)
        return features

    @staticmethod
    def stitch(tiles: Tensor, view: View) -> Tensor:
        """Tile features [B, rows * columns, patches, D] -> pooled grid [B, patches, D]."""
        b, _, _, dim = tiles.shape
        side, margin = view.geometry.grid, view.geometry.margin
        grid = tiles.view(b, view.rows, view.columns, side, side, dim)
        strips = []
        for i in range(view.rows):
            top, bottom = (0 if i == 0 else margin), (side if i == view.rows - 1 else side - margin)
            row = []
            for j in range(view.columns):
                left = 0 if j == 0 else margin
                right = side if j == view.columns - 1 else side - margin
                row.append(grid[:, i, j, top:bottom, left:right])
            strips.append(torch.cat(row, 2))
        whole = torch.cat(strips, 1)
        down = pool_matrix(whole.shape[1], side).to(whole)
        across = pool_matrix(whole.shape[2], side).to(whole)
        pooled = torch.einsum("yi,bixd->byxd", down, whole)
        return torch.einsum("xj,byjd->byxd", across, pooled).reshape(b, side * side, dim)

    def forward(self, crops: Tensor, view: View) -> Tensor:
        """Normalised crops [B, n, 3, crop, crop] -> image embeddings [B, patches, dim]."""
        b, n = crops.shape[:2]
        features = self.encode(crops.flatten(0, 1)).view(b, n, self.grid**2, -1)
        whole = features[:, 0]
        local = whole if view.crops == 1 else self.stitch(features[:, 1:], view)
        image: Tensor = self.proj_mlp(torch.cat((whole, local), -1))
        return image


class Tau(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.wq = nn.Parameter(torch.zeros(c.heads, 3 * c.dim))
        self.wv = nn.Parameter(torch.zeros(c.heads, 3 * c.dim))
        self.alpha = nn.Parameter(torch.zeros(c.heads))

    def forward(self, qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """qkv [B, S, 3 dim], position [B, S] -> factors for q and v [B, heads, S, 1]."""
        f = F.gelu(qkv)
        s = 1 + (torch.sigmoid(self.alpha * torch.log(position.float() + 1).unsqueeze(-1)) - 0.5)
        q = torch.tanh(F.linear(f, self.wq)) + s
        v = torch.tanh(F.linear(f, self.wv)) + s
        return q.transpose(1, 2).unsqueeze(-1), v.transpose(1, 2).unsqueeze(-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first 32 dims in pairs (j, j + 16). x [B, heads, S, D]; cos, sin [B, 1, S, 16]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


class TextAttention(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.heads, self.prefix = c.heads, c.view.prefix
        self.qkv = nn.Linear(c.dim, 3 * c.dim)
        self.proj = nn.Linear(c.dim, c.dim)
        self.tau = Tau(c)

    def forward(
        self, u: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        """The prefix's positions attend to each other. The rest attend as mask [B, 1, S - prefix, S] allows."""
        b, s, dim = u.shape
        p = self.prefix
        qkv = self.qkv(u)
        tau_q, tau_v = self.tau(qkv, position)
        q, k, v = qkv.view(b, s, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q = rotate(q * tau_q.to(q.dtype), cos, sin)
        k = rotate(k, cos, sin)
        v = v * tau_v.to(v.dtype)
        out = F.scaled_dot_product_attention(q[:, :, :p], k[:, :, :p], v[:, :, :p])
        if mask is not None:
            later = F.scaled_dot_product_attention(q[:, :, p:], k, v, attn_mask=mask)
            out = torch.cat((out, later), 2)
        mixed: Tensor = self.proj(out.transpose(1, 2).reshape(b, s, dim))
        return mixed


class Experts(nn.Module):
    """fc1 rows are h then g; every expert is computed and the gates of all but the chosen ones are zero."""

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.chosen = c.experts_per_token
        self.router = nn.Linear(c.dim, c.experts)
        self.fc1 = _Weights(c.experts, 2 * c.expert_inner, c.dim)
        self.fc2 = _Weights(c.experts, c.dim, c.expert_inner)

    def gates(self, u: Tensor) -> Tensor:
        """Softmax over the chosen experts, 0 for the others [.., E]."""
        logits = self.router(u).float()
        top, index = logits.topk(self.chosen, -1)
        return torch.zeros_like(logits).scatter(-1, index, top.softmax(-1))

    def forward(self, u: Tensor) -> Tensor:
        gates = self.gates(u)
        e, both, dim = self.fc1.weight.shape
        hidden = F.linear(u, self.fc1.weight.reshape(e * both, dim)).unflatten(-1, (e, both))
        h, g = hidden.chunk(2, -1)
        active = F.gelu(h) * (g + 1) * gates.unsqueeze(-1).to(h.dtype)
        return F.linear(active.flatten(-2), self.fc2.weight.permute(1, 0, 2).reshape(dim, -1))


class _Weights(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


class TextBlock(nn.Module):
    def __init__(self, c: Sizes, layer: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(c.dim)
        self.attn = TextAttention(c)
        self.mlp: nn.Module = Experts(c) if layer >= c.moe_start else Mlp(c.dim, c.ff_dim)

    def forward(
        self, x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None
    ) -> Tensor:
        u = self.ln(x)
        mixed: Tensor = self.mlp(u)
        return x + self.attn(u, position, cos, sin, mask) + mixed


class Text(nn.Module):
    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.wte = nn.Parameter(torch.randn(c.vocab, c.dim) * 0.5)
        self.blocks = nn.ModuleList(TextBlock(c, i) for i in range(c.layers))
        self.post_ln = nn.LayerNorm(c.dim)
        self.lm_head = nn.Linear(c.dim, c.vocab)
        self.theta, self.rotary = c.rope_theta, c.rotary

    def forward(self, x: Tensor, position: Tensor, mask: Tensor | None) -> Tensor:
        """Input embeddings [B, S, dim] -> residual stream before post_ln."""
        places = torch.arange(0, self.rotary, 2, device=x.device).float()
        rate = self.theta ** (-places / self.rotary)
        angle = position.float().unsqueeze(-1) * rate
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        for block in self.blocks:
            x = block(x, position, cos, sin, mask)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(self.post_ln(hidden))
        return scores


class Region(nn.Module):
    coord_features: Tensor
    size_features: Tensor

    def __init__(self, c: Sizes) -> None:
        super().__init__()
        self.register_buffer("coord_features", torch.randn(1, c.coord_features // 2) * 6)
        self.register_buffer("size_features", torch.randn(2, c.size_features // 2) * 4)
        self.coord_encoder = nn.Linear(c.coord_features, c.dim)
        self.size_encoder = nn.Linear(c.size_features, c.dim)
        self.coord_decoder = nn.Linear(c.dim, c.bins)
        self.size_decoder = nn.Linear(c.dim, 2 * c.bins)
        self.ln = nn.LayerNorm(c.dim)

    @staticmethod
    def _fourier(value: Tensor, features: Tensor) -> Tensor:
        f = 2 * math.pi * torch.matmul(value.float(), features.float())
        return torch.cat((f.cos(), f.sin()), -1)

    def encode_coord(self, value: Tensor) -> Tensor:
        """Coordinates [..., 1] -> [..., dim]."""
        out: Tensor = self.coord_encoder(self._fourier(value, self.coord_features))
        return out

    def encode_size(self, value: Tensor) -> Tensor:
        """Widths and heights [..., 2] -> [..., dim]."""
        out: Tensor = self.size_encoder(self._fourier(value, self.size_features))
        return out

    def coord_logits(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.coord_decoder(self.ln(hidden))
        return scores

    def size_logits(self, hidden: Tensor) -> Tensor:
        """[..., 2, bins]: width, height."""
        scores: Tensor = self.size_decoder(self.ln(hidden))
        return scores.unflatten(-1, (2, scores.shape[-1] // 2))


class Moondream(nn.Module):
    def __init__(self, config: Sizes | None = None) -> None:
        super().__init__()
        self.config = config or Sizes()
        self.vision = Vision(self.config)
        self.text = Text(self.config)
        self.region = Region(self.config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(module.in_features))
                nn.init.zeros_(module.bias)
        self.region.coord_features.copy_(self.region.coord_features.bfloat16().float())
        self.region.size_features.copy_(self.region.size_features.bfloat16().float())

    def embed(self, ids: Tensor, values: Tensor) -> Tensor:
        """ids [B, L], values [B, L, 2] -> embeddings; ids 5 and 6 take the region encoders' output."""
        x = F.embedding(ids, self.text.wte)
        coord = self.region.encode_coord(values[..., :1]).to(x.dtype)
        size = self.region.encode_size(values).to(x.dtype)
        x = torch.where((ids == 5).unsqueeze(-1), coord, x)
        return torch.where((ids == 6).unsqueeze(-1), size, x)

    def decode(
        self, image: Tensor, ids: Tensor, values: Tensor, position: Tensor, mask: Tensor
    ) -> Tensor:
        """Image embeddings [B, patches, dim] and prompts [B, L] -> hidden states of the prompts [B, L, dim].

        position [B, L]; mask [B, 1, L, prefix + L] boolean, True where a prompt position may look.
        """
        b = image.shape[0]
        bos = self.text.wte[:1].expand(b, 1, -1)
        words = self.embed(ids, values)
        x = torch.cat((bos.to(image.dtype), image, words.to(image.dtype)), 1)
        length = self.config.view.prefix
        prefix = torch.arange(length, device=ids.device).expand(b, -1)
        hidden: Tensor = self.text(x, torch.cat((prefix, position), 1), mask)
        return hidden[:, length:]


def prompt_mask(document: Tensor, before: int = TINY.prefix) -> Tensor:
    """document [B, L] (-1: padding) -> [B, 1, L, before + L]: the image, and earlier ids of the same prompt."""
    length = document.shape[1]
    same = document.unsqueeze(2) == document.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=document.device).tril()
    prefix = torch.ones(*document.shape, before, dtype=torch.bool, device=document.device)
    return torch.cat((prefix, same & causal), 2).unsqueeze(1)
