"""The Hopper kernel against models.text.Moe where there is one; elsewhere all around it, with torch in its place."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.moe.moe_layer import Layer, relative_error
from tests.kernels.tensors import DEVICE, poisoned

moe_hopper = pytest.importorskip("kestrel_engine.kernels.moe.hopper")
moe_prefill = pytest.importorskip("kestrel_engine.kernels.moe.prefill")
route = pytest.importorskip("kestrel_engine.kernels.moe.route").route
Experts = pytest.importorskip("kestrel_engine.kernels.moe.tile").Experts
quantise_rows = pytest.importorskip("kestrel_engine.kernels.linear.fp8_rows").quantise_rows

ON_HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9


def product_in_torch(up, rows, row_scale, grouping, weight, scale, outputs):
    """What `moe_hopper._launch` says."""
    rows = rows.float() if row_scale is None else rows.float() * row_scale
    for expert, begin, end in grouping.tiles[:, : int(grouping.used)].T.tolist():
        places = slice(begin, min(end, begin + grouping.tile))
        w = weight[expert].float() * scale[expert, :, None]
        y = F.linear(rows[places], moe_hopper.in_kernel_order(w) if row_scale is None else w)
        if up:
            h, g = y.chunk(2, dim=-1)
            product = F.gelu(h) * (g + 1) * 2.0**-6
            in_order = moe_hopper.in_kernel_order(product) if row_scale is None else product
            outputs[places] = in_order.to(outputs.dtype)
        else:
            outputs[grouping.order[places].long()] = (y * 2.0**6).to(outputs.dtype)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tile", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_products_are_the_models_layer(fp8, tile, monkeypatch):
    if not ON_HOPPER:
        monkeypatch.setattr(moe_hopper, "_launch", product_in_torch)
    # An expert for everyone, in two tiles and a half of 64; two for nobody.
    dim, inner, tokens = (512, 256, 700) if ON_HOPPER else (256, 128, 150)
    layer = Layer(num_experts=8, k=3, dim=dim, inner=inner, fp8=True)
    layer.bias[2] = 100.0
    layer.bias[[0, 7]] = -100.0
    u = torch.randn(tokens, dim, device=DEVICE).to(torch.bfloat16)
    weights, chosen = route(layer.logits(u), layer.k)
    outputs = poisoned(tokens * layer.k, dim, dtype=torch.bfloat16)
    rows = quantise_rows(u) if fp8 else None
    experts = Experts(*layer.tensors())
    moe_hopper.products(u, chosen, experts, outputs, in_fp8=rows, tile=tile)
    pairs = outputs.float().view(tokens, layer.k, dim)
    found = (pairs * weights[..., None]).sum(1)
    # The interpreter rounds to e4m3 wrongly where a binade ends.
    bound = (0.06 if ON_HOPPER else 0.13) if fp8 else 4e-3
    assert relative_error(found, layer.expected(u)) < bound


def test_only_fp8_experts_of_whole_blocks_and_enough_tokens_on_hopper():
    layer = Layer(num_experts=2, k=1, dim=256, inner=128, fp8=True)
    experts, u = Experts(*layer.tensors()), torch.randn(4, 256, device=DEVICE).bfloat16()
    assert moe_hopper.takes(u, experts, 200) == ON_HOPPER
    assert not moe_hopper.takes(u.float(), experts, 200)
    assert not moe_hopper.takes(u.half(), experts, 200)
    assert not moe_hopper.takes(u, experts, 4)
    wide = Layer(num_experts=2, k=1, dim=256, inner=128)
    assert not moe_hopper.takes(u, Experts(*wide.tensors()), 200)
    odd = Layer(num_experts=2, k=1, dim=256, inner=64, fp8=True)
    assert not moe_hopper.takes(u, Experts(*odd.tensors()), 200)


@pytest.mark.parametrize(
    ("mean", "exact", "fp8"), [(24, 64, 64), (95, 128, 128), (188, 64, 128), (475, 128, 128)]
)
def test_tiles_are_the_faster_ones(mean, exact, fp8):
    assert moe_hopper.pairs_of_a_tile(mean, fp8=False) == exact
    assert moe_hopper.pairs_of_a_tile(mean, fp8=True) == fp8


@pytest.mark.skipif(not ON_HOPPER, reason="needs Hopper")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [100, 300])
def test_a_graph_replays_it_for_other_tokens(fp8, tokens):
    """What it fetches from lies where the graph's own memory is, whatever was allocated in between."""
    layer = Layer(num_experts=8, k=3, dim=512, inner=256, fp8=True)
    first, other = torch.randn(2, tokens, 512, device=DEVICE).bfloat16()
    u, logits = first.clone(), layer.logits(first)
    assert moe_hopper.takes(u, Experts(*layer.tensors()), 3 * tokens)

    def run():
        rows = quantise_rows(u) if fp8 else None
        chosen = route(logits, layer.k)
        return moe_prefill.moe_prefill(u, *chosen, *layer.tensors(), in_fp8=rows)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    u.copy_(other)
    logits.copy_(layer.logits(other))
    wanted = run()
    junk = [poisoned(1 << size) for size in range(10, 24)]
    for _ in range(2):
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, wanted)
    assert relative_error(found, layer.expected(other)) < (0.06 if fp8 else 6e-3)
    assert all(bool(part.isnan().all()) for part in junk), "nothing else is written to"


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from kestrel_engine.kernels.moe import hopper as moe_hopper

for up, fp8, tile in (True, False, 128), (False, False, 64), (False, True, 128):
    rows, block = ("fp8e4nv", 128) if fp8 else ("fp16", 64)
    of_rows = gl.NVMMASharedLayout(128, 8 if fp8 else 16, 2)
    of_weight = gl.NVMMASharedLayout(block, 8, 2)
    types = {
        "rows": f"tensordesc<{rows}[{tile}, {block}],{of_rows!r}>",
        "weight": f"tensordesc<fp8e4nv[64, {block}],{of_weight!r}>",
        "order": "*i32", "tiles": "*i32", "used": "*i32", "scale": "*fp32", "row_scale": "*fp32",
        "outputs": "*fp16" if up else "*bf16", "num_tiles": "i32",
    }
    constants = {
        "NUM_INPUTS": 2048 if up else 1024, "NUM_ROWS": 2048, "UP": up, "FP8": fp8, "STAGES": 4,
        "PROGRAMS": 132, "PRODUCT_SCALE": 2.0**-6,
    }
    names = moe_hopper._kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = GluonASTSource(moe_hopper._kernel, signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx, "the tensor cores' own instruction"
    assert ".local" not in ptx, "registers suffice"
    # Widened weights are the register operand: no shared memory is written for them.
    assert fp8 or "cvt.rn.f16x2.e4m3x2" in ptx
    print(up, fp8, kernel.metadata.shared)
"""


@pytest.mark.slow
def test_it_compiles_for_hopper_without_one():
    """In a process of its own: interpreted kernels leave Triton's language patched."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(int(line.split()[-1]) <= 232_448 for line in done.stdout.splitlines())
