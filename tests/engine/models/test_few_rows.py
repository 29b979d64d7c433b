"""Products of few rows on a CPU, compiled for each kind of processor: exact but for the rounding of x."""

from pathlib import Path

import pytest
import torch

from kestrel_engine.models import weight_only
from kestrel_engine.models.compiled import few_rows, host_code
from kestrel_engine.models.weight_only import product, round_rows, round_to_groups, widened

pytestmark = pytest.mark.skipif(
    not few_rows.available(), reason="needs a processor of the kind x86-64, Linux and llvmlite"
)

N, K = 272, 2048
PROCESSORS = {
    "this": None,
    "avx2": {"avx2": True},
    "avxvnni": {"avx2": True, "avxvnni": True},
}


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """Compiles with the instructions of older processors, too."""
    features = PROCESSORS[request.param]
    if features == PROCESSORS["avxvnni"] and not host_code.features().get("avx512vnni"):
        pytest.skip("this processor has no such instructions")
    few_rows._compiled.cache_clear()
    monkeypatch.setattr(few_rows, "SMALL", 0)
    if features is not None:
        monkeypatch.setattr(host_code, "features", lambda: features)
    yield request.param
    few_rows._compiled.cache_clear()


def weight_of(form):
    """A weight, its scales, and its values in float32."""
    wide = torch.randn(N, K, generator=torch.Generator().manual_seed(3)) * 0.02
    if form == "bf16":
        return wide.bfloat16(), None, wide.bfloat16().float()
    weight, scales = (round_rows if form == "int8" else round_to_groups)(wide)
    tensors = {"a.weight": weight, "a.scale": scales}
    weight_only.pack_for_cpu(tensors)
    values = widened(weight, scales, torch.float32)
    assert torch.equal(widened(*tensors.values(), torch.float32), values)
    return *tensors.values(), values


def rounded(x, group):
    """``x`` as whole multiples of a step for each group: what the products with int8 and int4 take."""
    groups = x.float().view(len(x), -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * torch.full_like(most, 127).div_(most.clamp_min(1e-9))).round()
    return (numbers * (most / 127)).view_as(x)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_products_are_those_of_the_rounded_rows_alone_and_together(form, processor):
    weight, scales, values = weight_of(form)
    group = few_rows.group_of(form, weight, scales)
    if group is None:
        assert (form, processor) == ("int8", "avx2") and weight.dim() == 2
        return
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(11, K, generator=generator) * torch.randn(11, K, generator=generator).exp()
    x[2, 128:384] = 0
    x = x.bfloat16()
    found = few_rows.product(form, x, weight, scales, group)
    wanted = (x.float() if form == "bf16" else rounded(x, group)) @ values.T
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.std()))
    for row in range(len(x)):
        alone = few_rows.product(form, x[row : row + 1], weight, scales, group)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_shows_in_its_row_only(form, bad):
    weight, scales, values = weight_of(form)
    x = torch.ones(2, K).bfloat16()
    x[0, 77] = bad
    found = few_rows.product(form, x, weight, scales, few_rows.group_of(form, weight, scales))
    assert not found[0].isfinite().any()
    torch.testing.assert_close(found[1], values.sum(1), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rows_that_are_not_contiguous_or_have_a_very_large_number(form):
    weight, scales, values = weight_of(form)
    group = few_rows.group_of(form, weight, scales)
    x = torch.randn(K, 2).T
    found = few_rows.product(form, x, weight, scales, group)
    assert torch.equal(found, few_rows.product(form, x.contiguous(), weight, scales, group))
    x = torch.zeros(1, K)
    x[0, 77] = 2e38
    found, wanted = few_rows.product(form, x, weight, scales, group)[0], values[:, 77] * 2e38
    finite = found.isfinite()
    torch.testing.assert_close(found[finite], wanted[finite], rtol=1e-3, atol=1e33)


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 3])
def test_a_models_product_uses_them_with_any_number_of_threads(threads, monkeypatch):
    calls = []
    monkeypatch.setattr(few_rows, "SMALL", 0)
    monkeypatch.setattr(
        few_rows, "product", lambda *a, its=few_rows.product: calls.append(a) or its(*a)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for form in ("bf16", "int8", "int4"):
            weight, scales, values = weight_of(form)
            x, bias = torch.randn(2, 1, K).bfloat16(), torch.randn(N).bfloat16()
            found = product(x, weight, scales, bias)
            assert found.shape == (2, 1, N) and found.dtype == torch.bfloat16
            for other in (bias.float(), bias.repeat_interleave(2)[::2]):
                assert torch.equal(found, product(x, weight, scales, other))
            wanted = x.float() @ values.T + bias.float()
            assert (found.float() - wanted).norm() < 0.02 * wanted.norm()
            many = product(x.expand(2, 9, K), weight, scales, None)
            assert (many[:, :1].float() + bias - wanted).norm() < 0.02 * wanted.norm()
    finally:
        torch.set_num_threads(before)
    assert [call[0] for call in calls[::3]] == ["bf16", "int8", "int4"]


@torch.inference_mode()
def test_what_they_cannot_take_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(few_rows, "SMALL", 0)
    monkeypatch.setattr(few_rows, "product", None)
    wide, narrow = torch.randn(64, 96), torch.randn(64, 90).bfloat16()
    for weight, scales in (
        (wide, None),
        (narrow, None),
        (narrow[:62, :64], None),
        (torch.randn(64, 256).bfloat16()[:, ::2], None),
        round_rows(wide),
        round_to_groups(wide.repeat(1, 8)),
    ):
        # float32, K or N that isn't divided, rows with gaps, groups of less than 64 or a row of too few groups
        x = torch.randn(1, weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1))
        x = x if weight is wide else x.bfloat16()
        expected = weight_only.widened(weight, scales, x.dtype) if scales is not None else weight
        found = product(x, weight, scales, None)
        assert (found - x @ expected.T).float().norm() < 0.02 * found.float().norm()
    with torch.enable_grad():
        weight = torch.randn(64, 128).bfloat16()
        product(torch.randn(1, 128).bfloat16(), weight, None, None)


@pytest.mark.parametrize("hidden", ["avx2", "f16c"])
def test_a_machine_that_hides_an_instruction_uses_torch(hidden, monkeypatch):
    features = {**host_code.features(), hidden: False}
    monkeypatch.setattr(host_code, "features", lambda: features)
    monkeypatch.setattr(host_code, "supported", host_code.supported.__wrapped__)
    assert not few_rows.available.__wrapped__()


def test_torchs_threads_are_found_in_a_folder_with_a_space(tmp_path, monkeypatch):
    library = tmp_path / "my venv" / "libgomp-1.so"
    library.parent.mkdir()
    library.symlink_to(host_code.openmp())
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 42    {library}\n7f02-7f03 rw-p 0 00:00 0 \n")
    monkeypatch.setattr(
        host_code, "Path", lambda path: Path(maps if path == "/proc/self/maps" else path)
    )
    assert host_code.openmp.__wrapped__() == str(library)
