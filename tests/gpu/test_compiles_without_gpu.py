"""Every kernel that the GPU runtime launches compiles for GPUs, on a machine without one.

Interpreted kernels compute the right numbers even where Triton's compiler refuses them, so this test records the
launches of interpreted passes and compiles them, with early launches where the device has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.gpu.graphs import Variant
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import EncodeSlice, StepPlan, TokenRule
from tests.engine.runtime.gpu.small_models import both_ways, small_model
from tests.engine.runtime.gpu.test_adapters import Tuned, adapters_of
from tests.engine.runtime.gpu.test_gpu_runtime import (
    POINT_X,
    POINT_Y,
    SIDES,
    SIZES,
    TEXT,
    WIDE,
    Talk,
    answers,
)

triton = pytest.importorskip("triton")
TensorDescriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
interpreter = pytest.importorskip("triton.runtime.interpreter")

CAPABILITY = "90"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled there anyway"),
]


def plain(value):
    """As compile_launches.py reads it."""
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, TensorDescriptor):
        sizes = [list(each) for each in (value.shape, value.strides, value.block_shape)]
        return {**plain(value.base), "descriptor": sizes}
    if isinstance(value, triton.language.dtype):
        return {"type": value.name}
    return getattr(value, "item", lambda: value)()


@pytest.fixture(scope="module")
def launches():
    found = {}
    run = interpreter.InterpretedFunction.run

    def recorded(self, *args, grid, warmup, **kwargs):
        launch = [
            self.fn.__module__,
            self.fn.__name__,
            [plain(value) for value in args],
            {name: plain(value) for name, value in kwargs.items()},
        ]
        kinds = [v if isinstance(v, dict) else type(v).__name__ for v in launch[2]]
        found.setdefault(json.dumps([*launch[:2], kinds, launch[3]], sort_keys=True), launch)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpretedFunction, "run", recorded)
        talk()
    return [*found.values()]


def talk():
    """Passes of all kinds: images, prompts, greedy and drawn rows, values, masks, likeliest ids, shared positions,
    adapters."""
    config, tensors = small_model("moondream3")  # It has all kernels of Moondream 2.
    tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    layout = SlabLayout(config.text, torch.bfloat16, torch.device("cpu"))
    (tuned,) = adapters_of(config, layout, (1, 20, ""))
    for slabs in tuned.slabs.values():
        slabs.zero_()  # Interpreted, other numbers of bfloat16 would overflow.
    runtime = GpuRuntime(config, tensors, adapters=layout, **{**SIZES, "max_batch_size": 8})
    try:
        _, image = both_ways("wide", 140, 60, config, seed=1)
        runtime.collect(
            runtime.launch(StepPlan(0, encode=(EncodeSlice(image, 0, image.num_crops),)))
        )
        hot = SamplingParams(temperature=1.0, top_p=0.9, seed=9)
        answers(
            runtime,
            [
                Talk(0, [0, 20], [TEXT, TokenRule(stop=3, top=5)]),
                Talk(1, [0, 22], [WIDE, TEXT], hot),
                Talk(2, [0, 31], [POINT_X, POINT_Y, SIDES, POINT_X]),
                Tuned(3, [0, 41], [TEXT, TEXT], tuned),
            ],
        )
        runtime._decode._send_padding()
        for greedy, shared in ((True, True), (True, False), (False, False)):
            runtime._decode._body(Variant(8, greedy, spatial=False, shared=shared))
    finally:
        runtime.close()


def test_every_launch_compiles(launches, tmp_path):
    for launch in launches:
        keywords = launch[3]
        if "PDL" in keywords:
            keywords.update(PDL=True, launch_pdl=True)
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compile_launches", CAPABILITY],
        input=json.dumps(launches),
        stdout=subprocess.PIPE,
        text=True,
        env={**environ, "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
    )
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(name, error) for name, error in compiled if error] == []
    assert len(compiled) == len(launches)
    assert len({name for name, _ in compiled}) > 20
