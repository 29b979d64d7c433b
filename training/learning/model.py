"""The model in training: the engine's layers over tensors that have gradients.

Tensors have the canonical names of checkpoints (docs/develop/moondream.md).
"""

import torch
from torch import Tensor

from kestrel_engine.checkpoint.weights.expected import expected_tensors
from kestrel_engine.models.attention import PrefixAttention
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.models.text import Placement, Tau, TextBlock
from kestrel_engine.models.vision import VisionBlock
from kestrel_engine.types.model_config import ModelConfig


def sincos_positions(dim: int, grid: int) -> Tensor:
    """Initial position embeddings [1, grid * grid, dim]: a quarter each of sin and cos for y and x."""
    frequency = 1.0 / 100 ** (torch.arange(dim // 4) / (dim // 4))
    at = torch.arange(grid).view(-1, 1) * frequency
    waves = torch.cat((at.sin(), at.cos()), 1)
    y, x = waves[:, None].expand(-1, grid, -1), waves[None].expand(grid, -1, -1)
    return torch.cat((y, x), -1).reshape(1, grid * grid, dim) * 0.5


def initial_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights to begin with. Fourier features have bfloat16 values, as they are stored."""
    found = {}
    for name, shape in expected_tensors(config).items():
        if name.endswith("_features"):
            found[name] = (torch.randn(shape) * (6 if "coord" in name else 4)).bfloat16().float()
        elif name == "vision.pos_emb":
            found[name] = sincos_positions(shape[-1], config.vision.grid)
        elif name == "text.wte":
            found[name] = torch.randn(shape) * 0.5
        elif name.endswith(".weight") and len(shape) > 1:
            found[name] = torch.nn.init.trunc_normal_(torch.empty(shape), std=shape[-1] ** -0.5)
        else:  # norms begin as the identity; biases and tau at zero
            found[name] = torch.full(shape, float(name.endswith(".weight")))
    return found


class Learner:
    """The model over ``tensors``, float32 on one device, which a step of training changes in place."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        self.parameters = {n: t for n, t in tensors.items() if not n.endswith("_features")}
        for parameter in self.parameters.values():
            parameter.requires_grad_()
        self._model = Moondream(config, tensors)
        self.text, self.vision, self.region = (
            self._model.text, self._model.vision, self._model.region
        )  # fmt: skip
        self._vision_block, self._text_block = _vision_block, _text_block

    def compile(self) -> None:
        """Compile block by block: the crop count varies from step to step, the rest is fixed."""
        self._vision_block = torch.compile(_vision_block, dynamic=True)
        self._text_block = torch.compile(_text_block)

    def embed_images(self, crops: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The distinct crops [B, n, side, side, 3] uint8 of images of one tiling -> [B, patches, dim]."""
        x = self.vision.encode_until(crops.flatten(0, 1), 0)
        for block in self.vision.blocks:
            x = self._vision_block(block, x)
        features = self.vision.post_ln(x).view(*crops.shape[:2], *x.shape[1:])
        overview = local = features[:, 0]
        if tiling != (1, 1):
            stitched = (self.vision.stitch(tiles, tiling) for tiles in features[:, 1:])
            local = torch.stack([self.vision.pool(each) for each in stitched])
        return self.vision.project(overview, local)

    def embed_prompts(self, ids: Tensor, values: Tensor) -> Tensor:
        """ids [B, L], values [B, L, 2] -> [B, L, dim]; coordinates and sizes take the region encoders' output."""
        x = self.text.embed(ids)
        for token, embedded in (
            (self.config.ids.coord_id, self.region.embed_coords(values[..., 0].flatten())),
            (self.config.ids.size_id, self.region.embed_sizes(values.flatten(0, 1))),
        ):
            x = torch.where((ids == token).unsqueeze(-1), embedded.view_as(x).to(x.dtype), x)
        return x

    def decode(
        self, images: Tensor, ids: Tensor, values: Tensor, position: Tensor, mask: Tensor
    ) -> Tensor:
        """Embeddings of images [B, patches, dim] and prompts [B, L] -> hidden states of the prompts [B, L, dim].

        position [B, L]; mask [B, 1, L, prefix + L]: added to the scores, or boolean, True where a position may look.
        """
        rows, length = ids.shape
        bos = self.text.embed(ids.new_full((1, 1), self.config.ids.bos_id)).expand(rows, 1, -1)
        words = self.embed_prompts(ids, values)
        x = torch.cat((bos.to(images.dtype), images, words.to(images.dtype)), 1).flatten(0, 1)
        before = torch.arange(self.config.image_prefix, device=ids.device).expand(rows, -1)
        placement = self.text.place(torch.cat((before, position), 1).flatten())
        for index, block in enumerate(self.text.blocks):
            # The engine's copy of tau's weights, which it joins, is from before the last step.
            block.tau = Tau.load(self.tensors, f"text.blocks.{index}.attn.tau")
            x = self._text_block(block, x, placement, mask)
        return x.view(rows, -1, x.shape[-1])[:, -length:]


def _vision_block(block: VisionBlock, x: Tensor) -> Tensor:
    return block(x)


def _text_block(block: TextBlock, x: Tensor, placement: Placement, mask: Tensor) -> Tensor:
    return block(x, placement, PrefixAttention(mask))


def prompt_mask(document: Tensor, before: int) -> Tensor:
    """document [B, L] (-1: padding) -> [B, 1, L, before + L]: the image, and earlier ids of the same prompt."""
    length = document.shape[1]
    same = document.unsqueeze(2) == document.unsqueeze(1)
    seen = same & same.new_ones(length, length).tril()
    return torch.cat((same.new_ones(*document.shape, before), seen), 2).unsqueeze(1)
