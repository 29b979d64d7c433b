"""The training losses: words, soft-labelled coordinates and sizes, an auxiliary head, balanced experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kestrel_grpc.scenes.tiling import GRID
from kestrel_grpc.scenes.vocabulary import COLOURS, SHAPES, STYLES
from training.learning.batches import SKILLS, Batch, Packed
from training.learning.model import Moondream, prompt_mask

SKILL_WEIGHTS = {
    "query": 1.0,
    "reasoning": 0.5,
    "point": 0.5,
    "detect": 0.5,
    "segment": 0.35,
    "caption": 0.35,
}
COORD_WEIGHT, SIZE_WEIGHT, BALANCE_WEIGHT = 0.3, 0.2, 0.01
JITTER = 0.004  # on coordinates fed back during training
SIGMA_START, SIGMA_END = 20.0, 2.0  # bins


class HelperHead(nn.Module):
    """Per image position: shape, colour and style of the object there and its box. Dropped after training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sizes = (len(SHAPES) + 1, len(COLOURS) + 1, len(STYLES) + 1, 4)
        self.out = nn.Linear(dim, sum(self.sizes))

    def forward(self, image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        """image [B, 324, dim]; boxes [B, 12, 4]; labels [B, 12, 3] -> loss."""
        at = (torch.arange(GRID, device=image.device) + 0.5) / GRID
        cy, cx = (c.flatten().view(1, -1, 1) for c in torch.meshgrid(at, at, indexing="ij"))
        x0, y0, x1, y1 = (boxes[:, None, :, i] for i in range(4))
        inside = (cx > x0) & (cx < x1) & (cy > y0) & (cy < y1) & (labels[:, None, :, 0] >= 0)
        area = torch.where(inside, (x1 - x0) * (y1 - y0), torch.full_like(x0 * cx, 9.0))
        least, index = area.min(-1)
        found = least < 9.0
        logits = self.out(image).float().split(self.sizes, -1)
        total = image.new_zeros((), dtype=torch.float32)
        for part in range(3):
            own = labels[:, :, part].gather(1, index)
            target = torch.where(found, own, torch.full_like(own, self.sizes[part] - 1))
            total = total + F.cross_entropy(logits[part].flatten(0, 1), target.flatten())
        centre = torch.cat((cx, cy, cx, cy), -1)
        true = (boxes.gather(1, index.unsqueeze(-1).expand(-1, -1, 4)) - centre) * 6
        error = F.smooth_l1_loss(logits[3], true, reduction="none", beta=0.1).sum(-1)
        return total + (error * found).sum() / found.sum().clamp_min(1)


def soft_cross_entropy(logits: Tensor, target: Tensor, sigma: float) -> Tensor:
    """Cross-entropy [N] of logits [N, bins] against a Gaussian of ``sigma`` bins around target [N]."""
    bins = torch.arange(logits.shape[-1], device=logits.device)
    label = torch.softmax(-0.5 * ((bins - target.unsqueeze(-1)) / sigma) ** 2, -1)
    return -(label * logits.float().log_softmax(-1)).sum(-1)


@dataclass(frozen=True)
class Outputs:
    """Logits at the trained positions of a batch."""

    image: Tensor  # [B, patches, dim]
    text: Tensor  # [T, vocab]
    coord: Tensor  # [C, bins]
    size: Tensor  # [S, 2, bins]
    balance: Tensor


def run(model: Moondream, pixels: Tensor, batch: Packed, jitter: float = 0.0) -> Outputs:
    """Forward pass over packed prompts. pixels: normalised crops [B, n, 3, crop, crop]."""
    image = model.vision(pixels, batch.view)
    values = batch.values
    if jitter:
        values = (values + torch.randn_like(values) * jitter * (values > 0)).clamp(0, 1)
    mask = torch.where(
        prompt_mask(batch.document, model.config.view.prefix), 0.0, float("-inf")
    ).to(image.dtype)
    hidden, balance = model.decode(image, batch.ids, values, batch.position, mask)
    flat = hidden.flatten(0, 1)
    return Outputs(
        image,
        model.text.logits(flat.index_select(0, batch.text_index)),
        model.region.coord_logits(flat.index_select(0, batch.coord_index)),
        model.region.size_logits(flat.index_select(0, batch.size_index)),
        balance,
    )


def loss_of(
    out: Outputs, batch: Batch, helper: HelperHead, progress: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss at ``progress`` 0..1, and its parts."""
    weights = torch.tensor([SKILL_WEIGHTS[s] for s in SKILLS], device=out.text.device)[
        batch.text_skill
    ]
    words = F.cross_entropy(out.text.float(), batch.text_target, reduction="none")
    text = (words * weights).sum() / weights.sum()
    sigma = SIGMA_END + (SIGMA_START - SIGMA_END) * max(0.0, 1 - progress / 0.3)
    coord = soft_cross_entropy(out.coord, batch.coord_target, sigma).mean()
    size = soft_cross_entropy(out.size, batch.size_target, sigma).mean()
    patches = helper(out.image, batch.boxes, batch.labels)
    help_weight = 0.3 + (0.03 - 0.3) * min(1.0, progress / 0.5)
    total = (
        text
        + COORD_WEIGHT * coord
        + SIZE_WEIGHT * size
        + help_weight * patches
        + BALANCE_WEIGHT * out.balance
    )
    parts = {"text": text, "coord": coord, "size": size, "patches": patches, "balance": out.balance}
    return total, parts
