"""The refiner against a plain implementation of moondream.md section 9.6 made of torch's own modules."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kestrel_engine.models.refiner import Refiner, RefinerConfig, early_block, refiner_shapes
from kestrel_engine.models.vision import VisionModel
from tests.engine.models.small import random_tensors, small_config

CONFIG = RefinerConfig(dim=64, enc_dim=24, grid=5, mlp_dim=48)
SIDE = 30


class ChannelNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    def __init__(self, dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.output_self_attn = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.cross_attn_token_to_image = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.cross_attn_image_to_token = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(dim) for _ in range(4))


class Plain(nn.Module):
    """The network as the specification lists it, for one image at a time."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        dim, self.grid = config.dim, config.grid
        self.image_proj = nn.Conv2d(config.enc_dim, dim, 1)
        self.image_pe = nn.Parameter(torch.empty(1, dim, config.grid, config.grid))
        self.mask_tokens = nn.Parameter(torch.empty(4, dim))
        self.iou_token = nn.Parameter(torch.empty(1, dim))
        self.output_pe = nn.Parameter(torch.empty(5, dim))
        self.hq_fusion = nn.ModuleDict(
            {
                "early_proj": nn.Sequential(
                    nn.Linear(config.enc_dim, dim), nn.LayerNorm(dim), nn.GELU()
                ),
                "fusion": nn.Sequential(
                    nn.Conv2d(2 * dim, dim, 1), nn.GroupNorm(dim // 8, dim), nn.GELU(),
                    nn.Conv2d(dim, dim, 3, padding=1), nn.GroupNorm(dim // 8, dim), nn.GELU(),
                ),
            }
        )  # fmt: skip
        widths = (1, dim // 16, dim // 8, dim // 4, dim)
        groups = (1, dim // 32, dim // 16, dim // 8)
        self.mask_encoder = nn.ModuleDict(
            {
                f"conv{i + 1}": nn.Sequential(
                    nn.Conv2d(widths[i], widths[i + 1], 3, stride=2, padding=1),
                    nn.GroupNorm(groups[i], widths[i + 1]),
                    nn.GELU(),
                )
                for i in range(4)
            }
        )
        self.transformer_blocks = nn.ModuleList(Block(dim, config.mlp_dim) for _ in range(2))
        self.final_token_to_image = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.final_norm = nn.LayerNorm(dim)
        layers: list[nn.Module] = []
        for width in (dim // 2, dim // 4, dim // 8):
            layers += [
                nn.ConvTranspose2d(2 * width, width, 2, stride=2),
                ChannelNorm(width),
                nn.GELU(),
            ]
            layers += [nn.Conv2d(width, width, 3, padding=1), ChannelNorm(width), nn.GELU()]
        self.upsample = nn.Sequential(*layers)
        last = dim // 8
        self.final_q_proj, self.final_norm_up = nn.Linear(dim, last), nn.LayerNorm(last)
        self.final_attn_up = nn.MultiheadAttention(last, 4, batch_first=True)
        self.mask_mlps = nn.ModuleList(self.mlp(last, last) for _ in range(4))
        self.iou_head = self.mlp(dim, 4)

    @staticmethod
    def mlp(width: int, out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, out)
        )  # fmt: skip

    def forward(self, final: Tensor, early: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """``final`` and ``early`` [patches, enc_dim], ``mask`` [side, side]: four logits and four estimates."""
        grid = self.grid

        def square(tokens: Tensor) -> Tensor:
            return tokens.T.reshape(1, -1, grid, grid)

        image = self.image_proj(square(final))
        fused = torch.cat([square(self.hq_fusion["early_proj"](early)), image], dim=1)
        image = self.hq_fusion["fusion"](fused)
        encoded = mask[None, None]
        for i in range(1, 5):
            encoded = self.mask_encoder[f"conv{i}"](encoded)
        image = image + F.interpolate(encoded, (grid, grid), mode="bilinear")
        x = image[0].reshape(image.shape[1], -1).T[None]
        pe = self.image_pe[0].reshape(image.shape[1], -1).T[None]
        t, tpe = torch.cat([self.mask_tokens, self.iou_token])[None], self.output_pe[None]
        for b in self.transformer_blocks:
            t = b.norm1(t + b.output_self_attn(t + tpe, t + tpe, t)[0])
            t = b.norm2(t + b.cross_attn_token_to_image(t + tpe, x + pe, x)[0])
            t = b.norm3(t + b.mlp(t))
            x = b.norm4(x + b.cross_attn_image_to_token(x + pe, t + tpe, t)[0])
        t = self.final_norm(t + self.final_token_to_image(t + tpe, x + pe, x)[0])
        up = self.upsample(square(x[0]))
        keys = up.flatten(2).movedim(1, 2)
        m = self.final_q_proj(t[:, :4])
        m = m + self.final_attn_up(self.final_norm_up(m), keys, keys)[0]
        masks = [torch.einsum("c,chw->hw", self.mask_mlps[i](m[0, i]), up[0]) for i in range(4)]
        side = mask.shape[-1]
        logits = F.interpolate(torch.stack(masks)[None], (side, side), mode="bilinear")
        return logits[0], self.iou_head(t[0, 4])


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, shape in refiner_shapes(CONFIG).items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 0.3 * noise if len(shape) == 1 else noise / max(1, noise[0].numel()) ** 0.5
    return found


@pytest.fixture(scope="module")
def both(tensors: dict[str, Tensor]) -> tuple[Plain, Refiner]:
    plain = Plain(CONFIG)
    plain.load_state_dict(tensors)  # Strict: the names and shapes are those of the modules.
    return plain.eval(), Refiner(CONFIG, tensors)


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    patches = CONFIG.grid**2
    final, early = (torch.randn(3, patches, CONFIG.enc_dim, generator=generator) for _ in range(2))
    return final, early, (torch.rand(3, SIDE, SIDE, generator=generator) > 0.5).float()


@torch.inference_mode()
def test_candidates_and_estimates_are_those_of_the_plain_network(both, inputs):
    plain, refiner = both
    logits, ious = refiner(refiner.image(*inputs[:2]), inputs[2])
    assert logits.shape == (3, 4, SIDE, SIDE)
    for row, (final, early, mask) in enumerate(zip(*inputs, strict=True)):
        wanted_logits, wanted_ious = plain(final, early, mask)
        torch.testing.assert_close(logits[row], wanted_logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ious[row], wanted_ious, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_five_iterations_each_take_the_best_candidate(both, inputs):
    plain, refiner = both
    refined = refiner.refine(*inputs)
    for row, (final, early, mask) in enumerate(zip(*inputs, strict=True)):
        for _ in range(5):
            logits, ious = plain(final, early, mask)
            mask = logits[int(ious.argmax())].sigmoid()
        torch.testing.assert_close(refined[row], mask, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_masks_of_a_batch_do_not_affect_one_another(both, inputs):
    _, refiner = both
    alone = torch.cat([refiner.refine(*(x[i : i + 1] for x in inputs)) for i in range(3)])
    torch.testing.assert_close(refiner.refine(*inputs), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_part_that_is_changed_changes_the_result(both, tensors, inputs):
    """Every tensor is used: none is loaded in vain, or twice in place of another."""
    _, refiner = both
    before = refiner(refiner.image(*inputs[:2]), inputs[2])
    for name, tensor in tensors.items():
        if name.endswith("in_proj_bias"):
            changed = tensor.clone()
            changed[-1] += 1  # A bias of all keys alike changes no softmax.
        else:
            changed = tensor * 1.5 + 0.1
        other = Refiner(CONFIG, {**tensors, name: changed})
        after = other(other.image(*inputs[:2]), inputs[2])
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), name


def test_shapes_of_the_released_refiner():
    shapes = refiner_shapes(RefinerConfig(dim=256, enc_dim=1152, grid=27, mlp_dim=2048))
    assert shapes["hq_fusion.fusion.0.weight"] == (256, 512, 1, 1)
    assert shapes["mask_encoder.conv4.0.weight"] == (256, 64, 3, 3)
    assert shapes["upsample.0.weight"] == (256, 128, 2, 2)
    assert shapes["upsample.16.norm.weight"] == (32,)
    assert shapes["final_attn_up.in_proj_weight"] == (96, 32)
    assert shapes["iou_head.4.weight"] == (4, 256)
    assert early_block(27) == 8


@torch.inference_mode()
def test_the_tower_gives_both_depths():
    config = small_config("moondream3")
    vision = VisionModel(config.vision, random_tensors(config))
    side = config.vision.crop_size
    # On a CPU, encode_crops encodes one crop at a time, and other passes round otherwise.
    crops = torch.randint(0, 255, (1, side, side, 3), dtype=torch.uint8)
    final, early = vision.encode_two_depths(crops, 0)
    assert torch.equal(final, vision.encode_crops(crops))
    assert not torch.equal(vision.post_ln(early), final)
    assert torch.equal(vision.post_ln(vision.blocks[1](early)), final)
