"""Batches, the optimiser, checkpoints, and a few steps on the CPU."""

import math
import random
from pathlib import Path

import pytest
import torch

from kestrel_grpc.scenes.tiling import GRID, PREFIX
from training.images.batch_images import ImageMaker
from training.learning import checkpoints
from training.learning.batches import SKILLS, TEXT_LENGTH, StepData, draw_batch
from training.learning.losses import HelperHead, loss_of, run, soft_cross_entropy
from training.learning.model import Moondream, Sizes, pool_matrix, prompt_mask
from training.learning.muon import Muon, orthogonalise
from training.prompts import PromptWriter, coord_bin, size_bin

SMALL = Sizes(
    dim=64, ff_dim=64, layers=2, heads=2, rotary=16, expert_inner=16, vision_dim=48, vision_layers=1,
    vision_heads=2, vision_ff=64, proj_inner=64,
)  # fmt: skip


def test_a_step_is_a_pure_function_of_seed_step_and_rank() -> None:
    first, again, other = (
        StepData(1, 2, 9, 0)[3],
        StepData(1, 2, 9, 0)[3],
        StepData(1, 2, 9, 0, rank=1)[3],
    )
    assert torch.equal(first.ids, again.ids) and torch.equal(first.shapes, again.shapes)
    assert first.view == other.view and not torch.equal(first.ids, other.ids)


def test_packed_prompts(writer: PromptWriter) -> None:
    batch = draw_batch(random.Random(3), writer, 4, 300, 200)
    assert batch.ids.shape == (4, TEXT_LENGTH) and (PREFIX + TEXT_LENGTH) % 16 == 0
    assert (batch.document >= 0).float().mean() > 0.85
    assert set(batch.text_skill.tolist()) == set(range(len(SKILLS)))
    assert int(batch.position[batch.document >= 0].min()) == PREFIX
    targets = batch.text_target
    assert (targets == 5).sum() == len(batch.coord_index) and (targets == 6).sum() == len(
        batch.size_index
    )


def test_bins_round_trip() -> None:
    assert coord_bin(289 / 1024) == 289
    for value in (0.01, 0.2, 1.0):
        assert 2 ** (10 * size_bin(value) / 1023 - 10) == pytest.approx(value)


def test_prompt_mask() -> None:
    mask = prompt_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0, 0]
    assert mask[:, :PREFIX].all()
    assert mask[:, PREFIX:].int().tolist()[:4] == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
    ]


def test_pooling_is_adaptive_average_pooling() -> None:
    x = torch.randn(1, 1, 46, 32)
    wanted = torch.nn.functional.adaptive_avg_pool2d(x, GRID)
    found = pool_matrix(46) @ x[0, 0] @ pool_matrix(32).t()
    assert torch.allclose(wanted[0, 0], found, atol=1e-5)


def test_orthogonalise() -> None:
    m = orthogonalise(torch.randn(3, 40, 24)).float()
    values = torch.linalg.svdvals(m)
    assert float(values.min()) > 0.5 and float(values.max()) < 1.4


def test_soft_labels_are_best_at_the_target() -> None:
    sharp = torch.full((1, 1024), -20.0)
    sharp[0, 400] = 0.0
    near, far = (soft_cross_entropy(sharp, torch.tensor([t]), 2.0) for t in (400.0, 420.0))
    assert float(near) < float(far)


@pytest.mark.slow
def test_a_few_steps_lower_the_loss(writer: PromptWriter) -> None:
    torch.manual_seed(0)
    model, helper = Moondream(SMALL), HelperHead(SMALL.dim)
    batch = draw_batch(random.Random(4), writer, 2, 140, 130)
    pixels = ImageMaker(compiled=False)(batch)
    muon = Muon(model, 2e-3)
    owned = {id(p) for p in muon.parameters}
    rest = [p for p in (*model.parameters(), *helper.parameters()) if id(p) not in owned]
    adam = torch.optim.AdamW(rest, 2e-3)
    losses = []
    for _ in range(8):
        loss, _ = loss_of(run(model, pixels, batch), batch, helper, 0.0)
        losses.append(float(loss.detach()))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*muon.parameters, *rest], 1.0)
        muon.step()
        adam.step()
        adam.zero_grad()
        for p in muon.parameters:
            p.grad = None
    assert all(math.isfinite(value) for value in losses)
    assert losses[-1] < 0.8 * losses[0]


def test_checkpoints_travel_in_small_pieces(tmp_path: Path) -> None:
    state = {"weights": torch.randn(5_000_000), "step": 7}
    checkpoints.save(tmp_path, state)
    pieces = sorted(tmp_path.glob("part-*.bin"))
    assert len(pieces) == 2 and all(p.stat().st_size < 16 * 2**20 for p in pieces)
    loaded = checkpoints.load(tmp_path)
    assert loaded["step"] == 7 and torch.equal(loaded["weights"], state["weights"])
