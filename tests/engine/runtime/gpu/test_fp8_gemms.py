"""Products of FP8 operands: their error, and what the tower and the decoder's prefill make of it on golden models.

Without a GPU Triton interprets the kernels around them; torch multiplies.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kestrel_engine.errors import ConfigError
from kestrel_engine.kernels.linear.fp8_rows import quantise_rows
from kestrel_engine.models.vision import VisionModel
from kestrel_engine.runtime.gpu import gemm
from kestrel_engine.runtime.gpu.attention.decode import PagedPrompts
from kestrel_engine.runtime.gpu.footprint import fp8_weight_bytes
from kestrel_engine.runtime.gpu.gemm import Fp8Linear, fp8_refused
from kestrel_engine.runtime.gpu.text import decode_step
from kestrel_engine.runtime.gpu.text import decoder as text_module
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.text.options import TextOptions
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.model_config import ModelConfig
from tests.checkpoint_loading import load_checkpoint
from tests.engine.models.small import random_tensors, small_config, with_fp8_experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""A GPU multiplies FP8 into half types; interpreted, bfloat16 is wrong."""
ONE_PRODUCT = 0.045
"""Relative error of one product of normal numbers: two roundings of 2.6 % each, independent: 3.7 %."""
TOWER = 0.08
"""Relative error of the features after a golden tower's layers: that of one product, once or twice."""
PREFILL = 0.1
"""The same of the residual stream after two layers of a golden decoder, and of its keys and values."""

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8"
)


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def on_device(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(DEVICE, DTYPE, copy=True) for name, tensor in tensors.items()}


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_with_its_bias(rows):
    x, bias = torch.randn(rows, 96, device=DEVICE), torch.randn(48, device=DEVICE).to(DTYPE)
    # Outputs of very different sizes show that each row of the weight has a scale of its own.
    weight = torch.randn(48, 96, device=DEVICE) * torch.logspace(-3, 3, 48, device=DEVICE)[:, None]
    layer = Fp8Linear.of(weight.to(DTYPE), bias)
    assert layer.weight.shape == (48, 96) and layer.scales.shape == (1, 48)
    room = torch.full((rows + 2, 48), torch.nan, device=DEVICE, dtype=DTYPE)
    found = layer(quantise_rows(x.to(DTYPE)), out=room[:rows])
    assert found.data_ptr() == room.data_ptr() and found.dtype == DTYPE
    assert bool(room[rows:].isnan().all())
    plain = Fp8Linear.of(weight.to(DTYPE))(quantise_rows(x.to(DTYPE)))
    torch.testing.assert_close(plain + bias, found, rtol=2e-2, atol=2e-2)
    wanted = x.double() @ weight.double().T
    errors = [off(plain[:, i], wanted[:, i]) for i in range(0, 48, 8)]
    assert sum(errors) / len(errors) < ONE_PRODUCT * (3 if rows == 1 else 1.3), errors


def test_it_is_the_product_of_what_was_rounded():
    x, weight = torch.randn(7, 64, device=DEVICE), torch.randn(32, 64, device=DEVICE)
    layer, rows = Fp8Linear.of(weight.to(DTYPE)), quantise_rows(x.to(DTYPE))
    wanted = (rows.values.double() * rows.scales) @ (layer.weight.double() * layer.scales.T).T
    assert off(layer(rows), wanted) < (1e-6 if DTYPE == torch.float32 else 4e-3)


def test_a_device_that_multiplies_so_is_not_refused(monkeypatch):
    assert fp8_refused(DEVICE, DTYPE) is None

    def not_here(*_, **__):
        raise RuntimeError("not supported here\nand a long trace")

    monkeypatch.setattr(torch, "_scaled_mm", not_here)
    assert fp8_refused(DEVICE, DTYPE) == "not supported here"


def test_shapes_that_tensor_cores_do_not_take_are_named():
    with pytest.raises(ConfigError, match=r"fp8_gemms.*\[32, 40\].*multiples of 16"):
        Fp8Linear.of(torch.randn(32, 40))
    config = small_config("moondream2")
    with pytest.raises(ConfigError, match="fp8_gemms"):
        FusedVision(config.vision, pack_weights(config, random_tensors(config)), fp8=True)


@pytest.mark.golden
@pytest.mark.parametrize("one_kernel", [False, True])
def test_a_tower_of_golden_weights(golden_folder, monkeypatch, one_kernel):
    """Crops of 25 patches: interpreted, each row takes milliseconds. ``one_kernel``: fc1 and fc2 as on Hopper."""
    monkeypatch.setattr(gemm, "LEAST_ADDED", 0)
    if DEVICE.type == "cpu" or not one_kernel:
        monkeypatch.setattr(gemm, "hopper_multiprocessors", lambda _: int(one_kernel))
    loaded = load_checkpoint(golden_folder("md2"))
    config = replace(loaded.config.vision, crop_size=70)
    tensors = loaded.tensors
    tensors["vision.pos_emb"] = tensors["vision.pos_emb"][:, : config.grid**2]
    plain = VisionModel(config, tensors)
    packed = pack_weights(loaded.config, on_device(tensors))
    fused = FusedVision(config, packed, fp8=True)
    crops = torch.randint(0, 256, (1, 70, 70, 3), dtype=torch.uint8)
    found = fused.encode_crops(crops.to(DEVICE)).cpu()
    error = off(found, plain.encode_crops(crops))
    assert 0.001 < error < TOWER, "not none: then nothing was rounded"


class Prompt:
    """A prompt whose first positions see one another, through a decoder with a pool of its own."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], count: int) -> None:
        self._config, self._count = config, count
        self._packed = pack_weights(config, on_device(tensors))
        ids = torch.randint(0, config.text.vocab_size, (count,))
        self._x = self._packed["text.wte"][ids.to(DEVICE)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        mask = torch.ones(self._count, self._count, dtype=torch.bool, device=DEVICE).tril()
        mask[: self._count // 2, : self._count // 2] = True
        parts = (part.transpose(0, 1) for part in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        out.copy_(attended.transpose(0, 1).flatten(1))

    def __call__(self, *, fp8: bool, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream, and keys and values of the pool."""
        text = self._config.text
        fused = FusedText(
            text, self._packed, TextOptions(max_rows=1, page_size=self._count, fp8=fp8)
        )
        shape = (2, text.n_layers, self._count, text.n_heads, text.head_dim)
        pool = torch.zeros(shape, device=DEVICE, dtype=DTYPE)
        places = torch.arange(self._count, device=DEVICE)
        x = fused.prefill(self._x.clone(), places, places, self.attend, *pool, rows=rows)
        return x, pool


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("model", ["md2", "md3"])
def test_prefill_of_golden_weights(golden_folder, model, monkeypatch):
    loaded = load_checkpoint(golden_folder(model))
    # Interpreted, each layer takes seconds: two dense ones, or a dense one in front of experts.
    moe = loaded.config.text.moe
    text = replace(loaded.config.text, n_layers=2 if moe is None else moe.start_layer + 1)
    prompt = Prompt(replace(loaded.config, text=text), loaded.tensors, 5)
    roundings = []
    experts = text_module.moe_prefill

    def recorded(u, *args, in_fp8, **kwargs):
        if in_fp8 is not None:
            roundings.append(off(in_fp8.values.float() * in_fp8.scales, u))
        return experts(u, *args, in_fp8=in_fp8, **kwargs)

    monkeypatch.setattr(text_module, "moe_prefill", recorded)
    (wanted, wanted_pool), (found, pool) = prompt(fp8=False), prompt(fp8=True)
    # A router's near tie may fall otherwise: one token gets another expert.
    assert 0.001 < off(found, wanted) < PREFILL * (1 if moe is None else 2.5)
    assert 0.001 < off(pool, wanted_pool) < PREFILL
    # Experts that can, on Hopper, get the same rows in FP8.
    assert len(roundings) == (moe is not None)
    assert all(0.001 < rounding < ONE_PRODUCT for rounding in roundings)


def test_only_wanted_rows_come_back():
    config = small_config("moondream2")
    prompt = Prompt(config, random_tensors(config), 5)
    rows = torch.tensor([4, 2], device=DEVICE)
    (whole, _), (some, _) = prompt(fp8=True), prompt(fp8=True, rows=rows)
    # Products of fewer rows may be computed otherwise.
    assert off(some, whole[rows]) < (1e-5 if DTYPE == torch.float32 else 2e-2)


def packed(family: str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Weights of a size at which blocks change the stream. "moondream3.1" has its experts in FP8."""
    config = small_config("moondream2" if family == "moondream2" else "moondream3")
    tensors = on_device(random_tensors(config))
    if family == "moondream3.1":
        tensors = with_fp8_experts(config, tensors)
    return config, pack_weights(config, tensors)


def step(
    config: ModelConfig, tensors: dict[str, Tensor], *, rows: int = 3, **kwargs: bool
) -> tuple[Tensor, FusedText]:
    """The stream after a decode step of rows at position 2, always with the same stream and pool."""
    text, page = config.text, 4
    torch.manual_seed(1)
    fused = FusedText(text, tensors, TextOptions(max_rows=3, page_size=page, **kwargs))
    shape = (2, text.n_layers, 4 * page, text.n_heads, text.head_dim)
    pool = torch.randn(shape, device=DEVICE).to(DTYPE)
    x = torch.randn(rows, text.dim, device=DEVICE).to(DTYPE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[:, None]
    positions = torch.full((rows,), 2, dtype=torch.int32, device=DEVICE)
    seqs = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    return fused.decode(x, positions, seqs, table, *pool), fused


@pytest.mark.parametrize(
    ("family", "inline_tau"),
    [
        pytest.param("moondream2", 64, marks=pytest.mark.slow),
        pytest.param("moondream3", 64, marks=pytest.mark.slow),
        ("moondream3.1", 64),
        pytest.param("moondream3.1", 0, marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_multiplies_the_rounded_weights(family, inline_tau, monkeypatch):
    """Experts, the router and tau's weights stay as they are. The GEMM of qkv computes what tau needs, or a launch."""
    monkeypatch.setattr(decode_step, "INLINE_TAU_ROWS", inline_tau)
    model = packed(family)
    plain, _ = step(*model)
    prompts_only, _ = step(*model, fp8=True)
    assert torch.equal(plain, prompts_only)
    found, fused = step(*model, fp8=True, fp8_decode=True)
    # A router's near tie may fall otherwise: one token gets another expert.
    limit = PREFILL * (1 if family == "moondream2" else 2.5)
    assert found.dtype == DTYPE and 1e-4 < off(found, plain) < limit
    # The same step with the rounded values in place of the weights. Only float16 remains as a difference.
    for layer, narrow in zip(fused.layers, fused.fp8_products, strict=True):
        assert narrow.writes is not None
        reads = layer.reads if layer.moe is None else layer.qkv
        for weight, rounded in ((reads.weight, narrow.reads), (layer.writes.weight, narrow.writes)):
            weight.copy_(rounded.weight.float() * rounded.scales.T)
    wanted, _ = step(*model)
    assert off(found, wanted) < (1e-3 if DTYPE == torch.float32 else 1e-2)


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@pytest.mark.parametrize(("which", "decode"), [("prefill", False), ("all", True)])
def test_the_copies_of_weights_take_the_bytes_that_are_reserved(family, which, decode):
    config, tensors = packed(family)
    fused = FusedText(
        config.text, tensors, TextOptions(max_rows=1, page_size=4, fp8=True, fp8_decode=decode)
    )
    copies = [
        linear for each in fused.fp8_products for linear in (each.reads, each.writes) if linear
    ]
    found = sum(each.weight.nbytes + each.scales.nbytes for each in copies)
    of_tower = fp8_weight_bytes(config, "vision") if which == "all" else 0
    assert found == fp8_weight_bytes(config, which) - of_tower


def test_steps_of_more_rows_than_experts_take_at_once_read_the_model_s_weights(monkeypatch):
    """They route by the product of qkv, and group their experts' tokens as prefill does."""
    monkeypatch.setattr(decode_step, "MAX_TOKENS", 2)
    model = packed("moondream3")
    (plain, _), (same, _) = step(*model), step(*model, fp8=True, fp8_decode=True)
    assert torch.equal(plain, same)
    (plain, _), (other, _) = (
        step(*model, rows=2, **fp8) for fp8 in ({}, {"fp8": True, "fp8_decode": True})
    )
    assert not torch.equal(plain, other)


@pytest.mark.parametrize("family", ["moondream2", "moondream3.1"])
def test_a_few_prompt_tokens_multiply_the_rounded_weights(family):
    """Of two sequences, whose tokens attend to each other within the pass."""
    config, tensors = packed(family)
    text, page, count = config.text, 4, 5
    torch.manual_seed(1)
    x = torch.randn(count, text.dim, device=DEVICE).to(DTYPE)
    table = torch.arange(4, dtype=torch.int32, device=DEVICE)[:, None]
    ints = {"dtype": torch.int32, "device": DEVICE}
    tiles = torch.tensor([[0, 0, 3, 0], [2, 3, 2, 0], [0, 0, 0, 0]], **ints)
    positions = torch.tensor([0, 1, 2, 0, 1], device=DEVICE)
    slots = torch.tensor([0, 1, 2, 2 * page, 2 * page + 1], device=DEVICE)

    def prompt(**kwargs: bool) -> tuple[Tensor, Tensor]:
        fused = FusedText(text, tensors, TextOptions(max_rows=1, page_size=page, **kwargs))
        few = fused.few_tokens(PagedPrompts(table, page), max_rows=count, page_size=page)
        shape = (2, text.n_layers, 4 * page, text.n_heads, text.head_dim)
        pool = torch.zeros(shape, device=DEVICE, dtype=DTYPE)
        rows = positions, slots, tiles
        return few(x.clone(), *rows, *pool, normed=None, shared=None), pool

    (plain, plain_pool), (found, pool) = prompt(), prompt(fp8=True, fp8_decode=True)
    # A router's near tie may fall otherwise: one token gets another expert.
    assert 1e-4 < off(found, plain) < PREFILL * (1 if family == "moondream2" else 2.5)
    assert 1e-4 < off(pool, plain_pool) < PREFILL
