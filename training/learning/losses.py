"""The training losses: words, soft-labelled coordinates and sizes, and a helper head for every cell of the picture."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.domains.photos.names import UNKNOWN
from training.learning import batches as b
from training.learning.batches import CHARACTERS, LABELS, LATER, NOTHING, SLOTS, Batch
from training.learning.model import Learner, prompt_mask
from training.prompts import writer

COORD_WEIGHT, SIZE_WEIGHT = 0.3, 0.2
UNKNOWN_ID = writer().encode(UNKNOWN)[0]
JITTER = 0.004  # on coordinates fed back during training
EMPTY = 0.01  # weight of a place without a character, or of a cell without an object
SIGMA_START, SIGMA_END, SIGMA_UNTIL = 16.0, 2.0, 0.08  # bins, and progress of the plan
HELP_START, HELP_END = 0.7, 0.2
# Of horizontal and upright characters, and of what an object stands for.
HELP_READ = (1.0, 0.7, 1.5)


class PageHelper(nn.Module):
    """Per cell: the characters in it, and class, colour and box of the object there, and what it stands for.

    Dropped after training. New parts go to the end, so that ``take`` keeps the rows of an earlier checkpoint.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.parts = (SLOTS * len(CHARACTERS), len(LABELS) - len(LATER) + 1, len(b.COLOUR_IDS) + 1, 4,
                      2 * SLOTS * len(CHARACTERS), len(LATER))  # fmt: skip
        self.out = nn.Linear(dim, sum(self.parts))

    @torch.no_grad()
    def take(self, state: Mapping[str, Tensor]) -> None:
        """The weights of a checkpoint's helper, which may have fewer parts. New parts begin at 0, so that they disturb
        nothing."""
        for name, own in self.state_dict().items():
            own[: len(state[name])] = state[name]
            own[len(state[name]) :] = 0

    def forward(self, image: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """image [B, patches, dim] -> the losses of characters and of objects."""
        text, label, colour, box, more, later = self.out(image).split(self.parts, -1)
        label = torch.cat((label, later), -1)
        empty = EMPTY * batch.complete
        characters = image.new_zeros((), dtype=torch.float32)
        read = torch.cat((text, more), -1)
        texts = read.reshape(*read.shape[:2], 3, SLOTS, -1).unbind(2)
        targets = torch.split(batch.characters.long(), SLOTS, -1)
        # Most objects have no label, so this loss counts none of them.
        for logits, target, share, none in zip(texts, targets, HELP_READ, (1, 1, 0), strict=True):
            weight = torch.where(target > 0, 1.0, none * empty[:, None, None])
            characters = characters + share * weighted(surprise(logits, target), weight, 1e-3)
        weight = torch.where(batch.labels > 0, 1.0, empty[:, None])
        objects = weighted(surprise(label, batch.labels), weight, 1e-3)
        has_colour = (batch.colours != b.NO_COLOUR).float()
        known = surprise(colour, batch.colours.clamp_min(0))
        objects = objects + 0.5 * weighted(known, has_colour)
        there = (batch.labels > 0).float()
        side = int(image.shape[1] ** 0.5)
        at = (torch.arange(side, device=image.device) + 0.5) / side
        cy, cx = (c.flatten() for c in torch.meshgrid(at, at, indexing="ij"))
        true = (batch.boxes - torch.stack((cx, cy, cx, cy), -1)) * 8
        error = F.smooth_l1_loss(box.float(), true, reduction="none", beta=0.1).sum(-1)
        return characters, objects + weighted(error, there)


def soft_cross_entropy(logits: Tensor, target: Tensor, sigma: Tensor | float) -> Tensor:
    """Cross-entropy [N] of logits [N, bins] against a Gaussian of ``sigma`` bins around target [N]."""
    bins = torch.arange(logits.shape[-1], device=logits.device)
    label = torch.softmax(-0.5 * ((bins - target.unsqueeze(-1)) / sigma) ** 2, -1)
    return -(label * logits.float().log_softmax(-1)).sum(-1)


def surprise(logits: Tensor, target: Tensor) -> Tensor:
    """The cross-entropy of each of ``target`` [...] by ``logits`` [..., classes]."""
    flat = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction="none")
    return flat.view_as(target)


def weighted(losses: Tensor, weights: Tensor, least: float = 1) -> Tensor:
    """The mean of ``losses`` by ``weights`` of the same shape, whose sum counts as ``least`` or more."""
    return (losses * weights).sum() / weights.sum().clamp_min(least)


@dataclass(frozen=True)
class Outputs:
    """Logits at all prompt positions of a batch, so that shapes do not depend on what is asked."""

    image: Tensor  # [B, patches, dim]
    text: Tensor  # [B * L, vocab]
    coord: Tensor  # [B * L, bins]
    size: Tensor  # [B * L, 2, bins]


def run(model: Learner, batch: Batch, crops: Tensor, jitter: float = 0.0) -> Outputs:
    """Forward pass over packed prompts. ``crops`` [B, n, side, side, 3] uint8 of the batch's pictures."""
    image = model.embed_images(crops, batch.tiling)
    values = batch.values
    if jitter:
        values = (values + torch.randn_like(values) * jitter * (values > 0)).clamp(0, 1)
    seen = prompt_mask(batch.document, model.config.image_prefix)
    mask = torch.where(seen, 0.0, float("-inf")).to(image.dtype)
    hidden = model.decode(image, batch.ids, values, batch.position, mask).flatten(0, 1)
    return Outputs(
        image, model.text.logits(hidden), model.region.coord_logits(hidden), model.region.size_logits(hidden)
    )  # fmt: skip


def loss_of(
    out: Outputs, batch: Batch, helper: PageHelper, progress: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The training loss at ``progress`` [] 0..1 of the whole plan, and its parts."""
    first = torch.arange(out.text.shape[-1], device=out.text.device) == UNKNOWN_ID
    words = surprise(out.text - batch.margin.view(-1, 1) * first, batch.next_id)
    text = weighted(words, batch.weight, 0)
    sigma = SIGMA_END + (SIGMA_START - SIGMA_END) * (1 - progress / SIGMA_UNTIL).clamp_min(0)
    places, extents = batch.next_coord.flatten(), batch.next_size.flatten()
    coord = weighted(soft_cross_entropy(out.coord, places, sigma), places != NOTHING)
    size = soft_cross_entropy(out.size.flatten(0, 1), extents, sigma)
    size = weighted(size, extents != NOTHING)
    characters, objects = helper(out.image, batch)
    share = HELP_START + (HELP_END - HELP_START) * (progress / 0.4).clamp_max(1)
    total = text + COORD_WEIGHT * coord + SIZE_WEIGHT * size + share * (characters + objects)
    rows = (words * batch.weight).detach().sum(1) / batch.weight.sum(1).clamp_min(1e-3)
    parts = {"rows": rows, "text": text, "coord": coord, "size": size}
    return total, {**parts, "characters": characters, "objects": objects}
