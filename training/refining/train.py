"""Train the refiner of kestrel-tiny on a CPU, for a time that is given in minutes.

    OMP_NUM_THREADS=1 python -m training.refining.train --minutes 12 --out out/refiner

The vision tower is that of the bundled model and does not change. The schedule follows the clock. At the end, the
averaged weights are written to OUT/refiner.safetensors.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from kestrel_engine.checkpoint.catalog import BUNDLED
from kestrel_engine.checkpoint.weights.loader import load_checkpoint
from kestrel_engine.models.refiner import (
    Refiner,
    RefinerConfig,
    early_block,
    num_parameters,
    refiner_shapes,
)
from kestrel_engine.models.vision import VisionModel
from training.refining.samples import Sample, samples

DIM, MLP_DIM = 64, 256
ROUNDS = 2
"""Iterations of a training step: one from the coarse mask, one from the result of the first."""


def new_tensors(config: RefinerConfig, seed: int) -> dict[str, Tensor]:
    """Returns random weights: scaled by the fan-in, norms as the identity, biases 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in refiner_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.full(shape, 1.0 if name.endswith("weight") else 0.0)
        else:
            drawn = torch.randn(shape, generator=generator)
            tensors[name] = drawn * _fan_in(name, shape, config) ** -0.5
    return tensors


def _fan_in(name: str, shape: tuple[int, ...], config: RefinerConfig) -> int:
    if name in ("mask_tokens", "iou_token", "output_pe", "image_pe"):
        return config.dim
    if name.startswith("upsample") and shape[2:] == (2, 2):
        # A transposed convolution that doubles: each result reads one pixel.
        return shape[0]
    return prod(shape[1:])


def loss_of(logits: Tensor, ious: Tensor, truth: Tensor) -> Tensor:
    """Cross entropy and dice of all candidates, and the error of their estimated IoUs.

    ``logits`` [n, 4, side, side], ``ious`` [n, 4], ``truth`` [n, side, side] in 0..1.
    """
    wanted = truth[:, None].expand_as(logits)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean((2, 3))
    found = logits.sigmoid()
    both = (found * wanted).sum((2, 3))
    dice = 1 - (2 * both + 1) / (found.sum((2, 3)) + wanted.sum((2, 3)) + 1)
    with torch.no_grad():
        hard, true = logits > 0, wanted > 0.5
        iou = (hard & true).sum((2, 3)) / (hard | true).sum((2, 3)).clamp_min(1)
    return (10 * entropy + dice).mean() + ((ious - iou) ** 2).mean()


def stack(batch: list[Sample]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns pixels [n, side, side, 3] uint8, coarse masks and true masks [n, side, side] float32."""
    pixels, coarse, truth = (
        torch.from_numpy(np.stack([getattr(s, name) for s in batch]))
        for name in ("pixels", "coarse", "truth")
    )
    return pixels, coarse.float(), truth


def hard_iou(mask: Tensor, truth: Tensor) -> float:
    """The mean IoU of thresholded masks [n, side, side]."""
    found, true = mask > 0.5, truth > 0.5
    both, either = (found & true).sum((1, 2)), (found | true).sum((1, 2)).clamp_min(1)
    return float((both / either).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="a refiner.safetensors to continue from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = load_checkpoint(BUNDLED / "kestrel_tiny")
    vision_config = loaded.config.vision
    vision = VisionModel(vision_config, loaded.tensors)
    early = early_block(vision_config.enc_n_layers)
    config = RefinerConfig(DIM, vision_config.enc_dim, vision_config.grid, MLP_DIM)
    tensors = load_file(args.resume) if args.resume else new_tensors(config, args.seed)
    tensors = {name: tensor.float().requires_grad_() for name, tensor in tensors.items()}
    averaged = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    refiner = Refiner(config, tensors)
    optimiser = torch.optim.AdamW(
        tensors.values(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    print(f"{num_parameters(config)} parameters", flush=True)
    held = stack(list(islice(samples("validation", vision_config), 24)))
    source = samples(f"train-{args.seed}", vision_config)
    began, step, seen = time.monotonic(), 0, 0.0
    reported = began
    while (progress := (time.monotonic() - began) / (60 * args.minutes)) < 1:
        pixels, mask, truth = stack(list(islice(source, args.batch)))
        with torch.inference_mode():
            final, stream = vision.encode_two_depths(pixels, early)
        image = refiner.image(final.clone(), stream.clone())
        loss = torch.zeros(())
        for _ in range(ROUNDS):
            logits, ious = refiner(image, mask)
            loss = loss + loss_of(logits, ious, truth)
            best = ious.detach().argmax(1)
            mask = logits.detach()[torch.arange(len(mask)), best].sigmoid()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(tensors.values(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * max(1 - progress, 0.02)
        optimiser.step()
        step += 1
        seen = 0.95 * seen + 0.05 * float(loss.detach())
        decay = min(0.99, step / (step + 20))
        with torch.no_grad():
            for name, tensor in tensors.items():
                averaged[name].lerp_(tensor, 1 - decay)
        if time.monotonic() - reported > 45:
            reported = time.monotonic()
            report(vision, Refiner(config, averaged), held, early, f"step {step} loss {seen:.4f}")
            write(averaged, args.out)
    report(vision, Refiner(config, averaged), held, early, f"step {step} loss {seen:.4f}")
    write(averaged, args.out)


@torch.no_grad()
def report(
    vision: VisionModel,
    refiner: Refiner,
    held: tuple[Tensor, Tensor, Tensor],
    early: int,
    what: str,
) -> None:
    """Prints the mean IoU of coarse and refined masks on crops that training does not use."""
    pixels, coarse, truth = held
    refined = []
    for first in range(0, len(pixels), 8):
        features = vision.encode_two_depths(pixels[first : first + 8], early)
        refined.append(refiner.refine(*features, coarse[first : first + 8]))
    figures = hard_iou(coarse, truth), hard_iou(torch.cat(refined), truth)
    print(f"{what}; IoU of crops: coarse {figures[0]:.4f}, refined {figures[1]:.4f}", flush=True)


def write(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes the weights as the engine loads them, in bfloat16."""
    halved = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(halved, folder / "refiner.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
