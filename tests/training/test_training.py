"""Steps, the optimiser, checkpoints, and a few steps on the CPU."""

import math
import random
from pathlib import Path

import pytest
import torch

from training.images.picture_images import PictureMaker
from training.kestrel_small import SIZES, VIEW
from training.learning import checkpoints
from training.learning.losses import PageHelper, loss_of, run, soft_cross_entropy
from training.learning.model import Moondream, Sizes, pool_matrix, prompt_mask
from training.learning.muon import Muon, orthogonalise
from training.mixture import draw_picture
from training.prompts import coord_bin, size_bin
from training.scenes.tiling import TINY
from training.writing import PictureBatch, draw_spoiling, pack

SMALL = Sizes(
    dim=64, ff_dim=64, layers=2, heads=2, rotary=16, vocab=SIZES.vocab, moe_start=2, vision_dim=48, vision_layers=1,
    vision_heads=2, vision_ff=64, proj_inner=64, view=VIEW,
)  # fmt: skip


@pytest.fixture
def batch() -> PictureBatch:
    rng = random.Random(4)
    pictures = [draw_picture(rng, "shapes", (320, 240)) for _ in range(2)]
    return pack(rng, pictures, draw_spoiling(rng, 2))


@torch.no_grad()
def test_packed_prompts_are_computed_as_single_ones(batch: PictureBatch) -> None:
    model = Moondream(SMALL)
    pixels = PictureMaker(compiled=False)(batch)
    out = run(model, pixels, batch)
    image = model.vision(pixels, batch.view)[:1]
    for number in range(int(batch.document[0].max()) + 1):
        where = (batch.document[0] == number).nonzero().flatten()
        ids, values = batch.ids[:1, where], batch.values[:1, where]
        mask = prompt_mask(torch.zeros_like(ids), VIEW.prefix)
        alone = model.text.logits(model.decode(image, ids, values, batch.position[:1, where], mask))
        trained = torch.isin(batch.text_index, where)
        assert trained.any()
        at = batch.text_index[trained] - where[0]
        assert torch.allclose(out.text[trained], alone[0, at], atol=1e-4)


def test_bins_round_trip() -> None:
    assert coord_bin(289 / 1024) == 289
    for value in (0.01, 0.2, 1.0):
        assert 2 ** (10 * size_bin(value) / 1023 - 10) == pytest.approx(value)


def test_prompt_mask() -> None:
    mask = prompt_mask(torch.tensor([[0, 0, 1, 1, -1]]))[0, 0]
    assert mask[:, : TINY.prefix].all()
    assert mask[:, TINY.prefix :].int().tolist()[:4] == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
    ]


def test_pooling_is_adaptive_average_pooling() -> None:
    x = torch.randn(1, 1, 46, 32)
    wanted = torch.nn.functional.adaptive_avg_pool2d(x, TINY.grid)
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
def test_a_few_steps_lower_the_loss(batch: PictureBatch) -> None:
    torch.manual_seed(0)
    model, helper = Moondream(SMALL), PageHelper(SMALL.dim)
    pixels = PictureMaker(compiled=False)(batch)
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
