import pytest
import torch

kernel = pytest.importorskip("kestrel_engine.kernels.sampling.read_bins")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "num_bins"), [(1, 1024), (5, 100), (0, 16)])
@pytest.mark.parametrize("reach", [0, 3, 5000])
def test_best_bins_and_how_likely_the_bins_near_them_are(rows, num_bins, dtype, reach):
    logits = torch.randn(rows, num_bins, device=DEVICE).to(dtype)
    bins, near = kernel.read_bins(logits, reach)
    assert bins.dtype == torch.int32 and near.dtype == torch.float32
    assert torch.equal(bins.long(), logits.argmax(dim=-1))
    expected = [
        sum(row.float().softmax(dim=-1)[max(0, best - reach) : best + reach + 1].tolist())
        for row, best in zip(logits, bins.tolist(), strict=True)
    ]
    assert near.tolist() == pytest.approx(expected, rel=1e-5)
    assert all(probability <= 1 for probability in near.tolist())


def test_bins_near_an_end_count_once():
    logits = torch.zeros(2, 64, device=DEVICE)
    logits[0, 0] = logits[1, 63] = 1.0
    total = 63 + torch.e
    assert kernel.read_bins(logits, 4)[1].tolist() == pytest.approx([(4 + torch.e) / total] * 2)


def test_the_first_of_equal_bins_wins():
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[1, [30, 12, 13]] = 2.0
    assert kernel.read_bins(logits, 2)[0].tolist() == [0, 12]


def test_rows_of_a_wider_matrix():
    logits = torch.randn(6, 128, device=DEVICE)[:, :64]
    assert torch.equal(kernel.read_bins(logits, 2)[0].long(), logits.argmax(dim=-1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_a_logit_that_is_not_finite_has_no_probability(value):
    logits = torch.randn(3, 40, device=DEVICE)
    logits[1, 17] = value
    bins, near = kernel.read_bins(logits, 2)
    assert near.isnan().tolist() == [False, True, False]
    assert 0 <= int(bins[1]) < 40
    logits[1] = value
    assert 0 <= int(kernel.read_bins(logits, 2)[0][1]) < 40
