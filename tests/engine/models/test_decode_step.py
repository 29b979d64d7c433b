"""All blocks in one compiled function: those of the model but for rounding, whatever the other rows and the threads."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.models import weight_only
from kestrel_engine.models.compiled import decode_step, few_rows
from kestrel_engine.models.compiled.decode_attention import DecodeAttention
from kestrel_engine.models.text import TextModel
from kestrel_engine.models.weight_only import round_rows, round_to_groups, scale_of
from kestrel_engine.types.model_config import TextConfig
from tests.engine.models.small import random_tensors, small_config

pytestmark = pytest.mark.skipif(
    not few_rows.available(), reason="needs a processor of the kind x86-64, Linux and llvmlite"
)

TEXT = TextConfig(
    dim=1024, ff_dim=2048, n_layers=2, n_heads=16, n_kv_heads=16, vocab_size=60, max_context=99
)
LENGTHS = 40, 1, 17


def model_of(form, text=TEXT):
    tensors = {}
    for name, wide in random_tensors(replace(small_config("moondream2"), text=text)).items():
        if not name.startswith("text."):
            continue
        tensors[name] = wide.bfloat16()
        if form != "bf16" and name.endswith(".weight") and wide.dim() == 2:
            rounding = round_rows if form == "int8" else round_to_groups
            tensors[name], tensors[scale_of(name)] = rounding(wide)
    weight_only.pack_for_cpu(tensors)
    return TextModel(text, tensors)


def inputs():
    """Rows, and pools with NaN where no sequence has written."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(LENGTHS), TEXT.dim, generator=generator).bfloat16()
    slots = list(torch.randperm(sum(LENGTHS), generator=generator).split(LENGTHS))
    pools = torch.randn(2, 2, 64, 16, 64, generator=generator).bfloat16()
    pools[:, :, sum(LENGTHS) :] = torch.nan
    return x, slots, pools


def run(model, x, slots, pools):
    positions = torch.tensor([len(each) - 1 for each in slots])
    return model(x, positions, DecodeAttention(*pools, slots))


def difference(found, wanted):
    return (found.float() - wanted.float()).norm() / wanted.float().norm()


@torch.inference_mode()
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_it_computes_what_the_blocks_do(form, monkeypatch):
    monkeypatch.setattr(weight_only, "GROUP", 64)
    model, (x, slots, pools) = model_of(form), inputs()
    assert model._decode_step is not None
    before, results = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            results.append((run(model, x, slots, own := pools.clone()), own))
        finally:
            torch.set_num_threads(before)
    (found, stored), (again, also_stored) = results
    assert torch.equal(found, again)
    assert torch.equal(stored.view(torch.int16), also_stored.view(torch.int16))
    alone = run(model, x[1:2], slots[1:2], pools.clone())
    assert torch.equal(alone[0], found[1])

    monkeypatch.setitem(vars(model), "_decode_step", None)
    wanted = run(model, x, slots, own := pools.clone())
    assert difference(found, wanted) < 0.02
    assert torch.equal(stored.isnan(), own.isnan())
    assert difference(stored.nan_to_num(), own.nan_to_num()) < 0.01


@torch.inference_mode()
def test_the_inputs_of_proj_and_fc2_are_kept_apart_though_they_have_one_size(monkeypatch):
    model, (x, slots, pools) = model_of("bf16", replace(TEXT, ff_dim=TEXT.dim)), inputs()
    assert model._decode_step is not None
    found = run(model, x[:1], slots[:1], pools.clone())
    monkeypatch.setitem(vars(model), "_decode_step", None)
    assert difference(found, run(model, x[:1], slots[:1], pools.clone())) < 0.02


def test_what_is_compiled_at_the_start_is_not_compiled_again():
    model, (x, slots, pools) = model_of("bf16"), inputs()
    model.compile_decode(len(x))
    so_far = decode_step._compiled.cache_info(), few_rows._compiled.cache_info()
    with torch.inference_mode():
        model.logits(run(model, x, slots, pools))
        model.logits(run(model, x[:1], slots[:1], pools))
    after = decode_step._compiled.cache_info(), few_rows._compiled.cache_info()
    assert [now.misses - before.misses for before, now in zip(so_far, after, strict=True)] == [0, 0]
    assert sum(now.hits - before.hits for before, now in zip(so_far, after, strict=True)) > 0


@torch.inference_mode()
def test_a_number_that_is_not_finite_shows_in_its_row_only():
    model, (x, slots, pools) = model_of("bf16"), inputs()
    x[0, 5] = torch.nan
    found = run(model, x, slots, pools)
    assert found.isfinite().all(1).tolist() == [False, True, True]


@torch.inference_mode()
def test_what_it_cannot_take_is_left_to_the_blocks(monkeypatch):
    model, (x, _, _) = model_of("bf16"), inputs()
    step = model._decode_step
    assert step is not None and step.takes(x)
    assert not step.takes(x.float()) and not step.takes(x.repeat(3, 1))
    with torch.enable_grad():
        assert not step.takes(x)
    for config in (small_config("moondream2"), small_config("moondream3")):
        tensors = {name: each.bfloat16() for name, each in random_tensors(config).items()}
        assert TextModel(config.text, tensors)._decode_step is None
    block = model.blocks[1]
    proj, norm = block.proj, block.ln
    for name, part in (
        ("proj", replace(proj, bias=None)),
        ("proj", replace(proj, weight=proj.weight.t())),
        ("proj", replace(proj, bias=proj.bias.float())),
        ("ln", replace(norm, weight=norm.weight.float())),
        ("ln", replace(norm, bias=norm.bias.repeat(2)[::2])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(block, name, part)
            del model._decode_step
            assert model._decode_step is None, name
