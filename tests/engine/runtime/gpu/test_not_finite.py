"""NaN planted in one row of a batch: GpuRuntime and TorchRuntime name that row, and the others are as without it.

On a machine with a CUDA device the passes are captured graphs.
"""

from typing import Any

import pytest
import torch

from kestrel_engine.models.layers import Mlp
from kestrel_engine.runtime.gpu.parts import Options
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.types.requests import SamplingParams
from kestrel_engine.types.step import EncodeSlice, LogitEdit, StepPlan, TokenRule
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import (
    DEVICE,
    POINT_X,
    POINT_Y,
    SIDES,
    SIZES,
    TEXT,
    WIDE,
    Talk,
    answers,
    image,
)

# What numpy, as the interpreter, says of numbers that are not finite.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.slow_with("gpu moondream2", "torch moondream2"),
]

BAD = 77
"""The id whose embedding is NaN."""
HOT = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
GREEDY = SamplingParams()
EDITED = TokenRule(edits=(LogitEdit(9, bias=1.0),))


@pytest.fixture(
    params=["gpu moondream2", "gpu moondream3", "torch moondream2", "torch moondream3"],
    scope="module",
)
def runtime(request):
    kind, family = request.param.split()
    config, tensors = small_model(family)
    made: Any = (gpu_runtime if kind == "gpu" else torch_runtime)(config, tensors, **SIZES)
    made.test_config = config
    made.model.text.wte[BAD] = torch.nan
    yield made
    made.close()


@pytest.fixture
def images(runtime):
    config = runtime.test_config
    wide, single = (
        picture("wide", (1, 3), config, seed=1),
        picture("single", (1, 1), config, seed=2),
    )
    plan = StepPlan(
        0,
        drop_images=("wide", "single"),
        encode=(EncodeSlice(wide, 0, 4), EncodeSlice(single, 0, 2)),
    )
    runtime.collect(runtime.launch(plan))


def embedding(runtime, key):
    """What the runtime keeps of an image."""
    if isinstance(runtime, GpuRuntime):
        return runtime.parts.images.prefix(key)
    return runtime.images[key]


def ask(runtime, talks):
    """({sequence: tokens}, sequences that were named)"""
    named: set[int] = set()
    return answers(runtime, talks, named=named), named


def fine():
    """Neighbours of all kinds: the reference sampler draws one with edits."""
    return [
        Talk(0, [0, 11, 12, 13], [TEXT] * 4),
        Talk(1, [0, 21, 22, 23, 24], [TEXT] * 3, HOT, chunk=3),
        Talk(2, [0, 31], [POINT_X, POINT_Y, SIDES, POINT_X]),
        Talk(3, [0, 20], [WIDE, EDITED]),
    ]


def check(runtime, *bad):
    """``bad`` are named, and nothing else changes."""
    if not hasattr(runtime, "test_alone"):
        wanted, none = ask(runtime, fine())
        assert none == set()
        runtime.test_alone = wanted
    got, named = ask(runtime, [*fine(), *bad])
    assert named == {talk.number for talk in bad}
    for number, tokens in runtime.test_alone.items():
        assert [(t.id, t.value) for t in got[number]] == [(t.id, t.value) for t in tokens], number
    return got


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(((EDITED, GREEDY), (WIDE, HOT)), id="edited and wide"),
        pytest.param(
            ((POINT_X, HOT), (SIDES, GREEDY)), id="value and forced", marks=pytest.mark.slow
        ),
    ],
)
def test_prompts(runtime, kinds):
    bad = [
        Talk(4 + n, [0, 9, BAD, 9, 9], [rule] * 3, sampling)
        for n, (rule, sampling) in enumerate(kinds)
    ]
    got = check(runtime, *bad)
    assert got[4] == got[5] == []


def test_a_chunk_of_a_prompt_that_samples_nothing(runtime):
    bad = Talk(4, [0, BAD, *range(20, 60)], [TEXT], chunk=6)
    check(runtime, bad)
    assert bad.fed <= 18, "two steps were out when the first came back"


@pytest.mark.parametrize(
    ("after", "other"), [(TEXT, SIDES), pytest.param(EDITED, POINT_X, marks=pytest.mark.slow)]
)
@pytest.mark.slow_with("gpu moondream3")
def test_a_token_while_decoding(runtime, after, other):
    talks = [
        Talk(4 + n, [0, 40 + n], [TEXT, TokenRule(forced=BAD), rule, TEXT], sampling)
        for n, (rule, sampling) in enumerate([(after, GREEDY), (other, HOT)])
    ]
    got = check(runtime, *talks)
    for number in (4, 5):
        assert [t.id for t in got[number]][1:] == [BAD], "the last one before it was fed"


@pytest.mark.slow_with("gpu moondream3")
def test_an_image(runtime, images):
    config = runtime.test_config
    with torch.inference_mode():
        embedding(runtime, "wide")[5, 3] = torch.nan
    about = [
        Talk(4, [*image(config, "wide"), 11], [TEXT] * 3),
        Talk(5, image(config, "wide"), [POINT_X, POINT_Y]),
    ]
    check(runtime, *about)
    single = Talk(6, [*image(config, "single"), 11], [TEXT] * 3)
    wanted, _ = ask(runtime, [Talk(6, single.prompt, single.rules)])
    got, named = ask(runtime, [Talk(4, [*image(config, "wide"), 11], [TEXT] * 3), single])
    assert named == {4}
    assert [t.id for t in got[6]] == [t.id for t in wanted[6]]
    # Encoded anew, it is as good as any.
    again = picture("wide", (1, 3), config, seed=1)
    plan = StepPlan(1, drop_images=("wide",), encode=(EncodeSlice(again, 0, 4),))
    runtime.collect(runtime.launch(plan))
    assert ask(runtime, [Talk(4, [*image(config, "wide"), 11], [TEXT] * 3)])[1] == set()


@pytest.mark.parametrize(
    ("head", "value"),
    [
        ("coord", torch.nan),
        pytest.param("coord", -torch.inf, marks=pytest.mark.slow),
        ("size", torch.inf),
    ],
)
def test_a_region_head(runtime, head, value):
    """It fails those who read it, and no others."""
    decoder = getattr(runtime.model.region, f"{head}_decoder")
    bias = decoder.fc2.bias if isinstance(decoder, Mlp) else decoder.bias
    kept = bias[7].clone()
    bias[7] = value
    try:
        talks = [
            Talk(0, [0, 11, 12], [TEXT] * 3),
            Talk(1, [0, 21], [POINT_Y if head == "size" else SIDES] * 3),
            Talk(2, [0, 31], [TEXT, SIDES if head == "size" else POINT_Y]),
        ]
        tokens, named = ask(runtime, talks)
    finally:
        bias[7] = kept
    assert named == {2}
    assert (len(tokens[0]), len(tokens[1]), len(tokens[2])) == (3, 3, 1)


@pytest.mark.slow_with("gpu moondream3")
def test_pages_that_hold_nan_go_from_hand_to_hand(runtime):
    """The next owner reads what it wrote itself, whatever lies beside it in its pages."""
    with torch.inference_mode():
        cache = runtime.parts.cache if isinstance(runtime, GpuRuntime) else runtime.cache
        cache.keys.fill_(torch.nan)
        cache.values.fill_(torch.nan)
    check(runtime)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["triton", "torch", "flashinfer"])
@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_graphs_of_every_kind_of_attention(family, attention, dtype):
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
        if dtype == torch.float32:
            pytest.skip("FlashInfer computes in half types")
    # FlashInfer has no kernels for heads of 32 values. Rows of 394 numbers are no multiple of 16 bytes.
    size = {"head_dim": 64} if attention == "flashinfer" else {}
    config, tensors = small_model(family, **size)
    tensors = {name: t.to(DEVICE, dtype) for name, t in tensors.items()}
    # No healthy row may choose it by itself, as row 0 does with heads of 64 values.
    tensors["text.lm_head.bias"][BAD] = -1e4
    made = GpuRuntime(config, tensors, Options(attention=attention, **SIZES))
    made.model.text.wte[BAD] = torch.nan
    assert made.parts.decode.graphs.graphs, "captured"
    rules = [TEXT, TokenRule(forced=BAD), TEXT, TEXT]
    bad = [Talk(4, [0, 9, BAD, 9], [TEXT] * 3), Talk(5, [0, 41], rules)]
    try:
        if dtype == torch.float32:
            check(made, *bad)
            return
        # In half types the size of a batch may change a token.
        got, named = ask(made, [*fine(), *bad])
        assert named == {4, 5}
        assert [len(got[talk.number]) for talk in fine()] == [len(talk.rules) for talk in fine()]
    finally:
        made.close()
