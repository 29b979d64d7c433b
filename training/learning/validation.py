"""Validation during training: teacher-forced exactness for each skill, on scenes that training does not use.

A prompt counts as exact when every id the model must produce is its first choice; the real, free-running
figures come from ``training.evaluate``.
"""

from __future__ import annotations

import random

import torch

from kestrel_grpc.scenes.scenes import draw_size
from training.images.batch_images import ImageMaker
from training.learning.batches import SKILLS, Batch, draw_batch
from training.learning.losses import run
from training.learning.model import Moondream
from training.prompts import PromptWriter


class Validation:
    """A few fixed batches of 96 images each."""

    def __init__(
        self, maker: ImageMaker, count: int, max_pixels: int = 0, images: int = 96
    ) -> None:
        self.maker = maker
        writer = PromptWriter.bundled()
        rng = random.Random("kestrel-tiny/validation")
        self.batches: list[Batch] = []
        while len(self.batches) < count:
            width, height = draw_size(rng)
            if not max_pixels or width * height <= max_pixels:
                self.batches.append(draw_batch(rng, writer, images, width, height))

    def report(self, model: Moondream, device: torch.device) -> None:
        """Print exactness per skill, and mean errors of coordinates (bins) and sizes (percent), per batch.

        Gradients stay on, so that the compiled blocks of training serve here too.
        """
        for cpu in self.batches:
            batch = cpu.to(device)
            with torch.autocast(device.type, torch.bfloat16):
                with torch.autocast(device.type, enabled=False):
                    pixels = self.maker(batch).bfloat16()
                out = run(model, pixels, batch)
            wrong = out.text.argmax(-1) != batch.text_target
            length = batch.ids.shape[1]
            prompt = batch.text_index // length * 64 + batch.document.flatten()[batch.text_index]
            figures = []
            for number, skill in enumerate(SKILLS):
                own = batch.text_skill == number
                asked, missed = (
                    len(torch.unique(prompt[own])),
                    len(torch.unique(prompt[own & wrong])),
                )
                figures.append(f"{skill} {100 * (1 - missed / max(asked, 1)):.1f}")
            coord = (out.coord.argmax(-1) - batch.coord_target).abs().mean()
            size = (out.size.argmax(-1) - batch.size_target).abs().mean() * (
                10 / 1023 * 0.693 * 100
            )
            view = batch.view
            print(
                f"  validation {view.width}x{view.height} ({view.rows},{view.columns}): {' '.join(figures)} "
                f"coord {coord:.2f} bins size {size:.2f} %",
                flush=True,
            )
