"""Warm-up launches every kind of kernel that serving launches, so that nothing is compiled while requests wait.

Triton compiles a kernel for each kind of arguments: types, constants, integers that are 1 or multiples of 16, pointers
that are aligned. The interpreter compiles nothing, so these tests record the kinds. tests/gpu/test_compiled_early.py
counts real compilations.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from kestrel_engine.kernels.attention.tau_content import TauWorkspace, tau_content
from kestrel_engine.kernels.decode_io import flag_rows
from kestrel_engine.kernels.images.patchify import patchify
from kestrel_engine.kernels.images.pool_tiles import pool_tiles
from kestrel_engine.kernels.layer_norm import layer_norm
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.gpu.graphs import RowAdapters, Variant
from kestrel_engine.runtime.gpu.parts import Options
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.gpu.state.staging import ImageUploader, Uploader
from kestrel_engine.runtime.gpu.vision.device_crops import DeviceCrops
from kestrel_engine.types.requests import PreparedImage
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.adapters.random_adapters import adapter, random_tensors
from tests.engine.runtime.gpu.small_models import picture, small_model

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="records the interpreter's launches"
)

TILINGS = ((1, 1), (1, 2), (2, 1), (1, 3), (2, 2), (3, 1))


class Launches:
    """The kinds of kernels that were launched since ``start``."""

    def __init__(self) -> None:
        self.kinds: set[tuple[Any, ...]] = set()

    def start(self) -> None:
        self.kinds = set()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    found = Launches()
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.kinds.add(kind_of(self, args, kwargs))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    yield found


def kind_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    parameters = inspect.signature(kernel.fn).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    same = kernel.kwargs.get("do_not_specialize") or ()
    any_place = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    kinds: list[Any] = [kernel.__name__]
    for name, value in sorted(given.items()):
        constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        kinds.append(
            (name, value if constant else kind_of_value(value, name in same, name in any_place))
        )
    return tuple(map(str, kinds))


def kind_of_value(value: Any, same: bool, any_place: bool) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, any_place or value.data_ptr() % 16 == 0
    if isinstance(value, int) and not same:
        return 1 if value == 1 else value % 16 == 0
    return type(value).__name__


def test_the_recorder_tells_kinds_apart(launches: Launches) -> None:
    weight = torch.ones(32)
    for rows in (1, 2, 3, 16, 32):
        layer_norm(torch.zeros(rows, 32), weight, weight, pending=None)
    assert len(launches.kinds) == 3


def test_one_kernel_serves_all_tilings_and_all_numbers_of_crops(launches: Launches) -> None:
    for down, across in TILINGS:
        count = 1 if (down, across) == (1, 1) else 1 + down * across
        pool_tiles(torch.zeros(count, 25, 64), (down, across), 5, 1, out=torch.empty(25, 128))
    assert len(launches.kinds) == 1


def test_one_kernel_makes_patches_of_any_number_of_crops_from_any_crop_on(
    launches: Launches,
) -> None:
    # A crop has 588 bytes, 12 more than a multiple of 16.
    crops = torch.zeros(17, 14, 14, 3, dtype=torch.uint8)
    for first, count in ((0, 1), (0, 16), (1, 1), (1, 16), (3, 2)):
        patchify(crops[first : first + count], 14, 592, torch.float32)
    assert len(launches.kinds) == 1


def test_one_kernel_serves_all_numbers_of_tokens_of_a_tiling(launches: Launches) -> None:
    workspace = TauWorkspace.allocate(4, torch.device("cpu"))
    weights = torch.zeros(4, 96)
    for tokens in (1, 2, 16, 33, 64):
        tau_content(torch.zeros(tokens, 96), weights, workspace)
    assert len(launches.kinds) == 1


def test_the_crops_of_any_images_need_no_other_kernels_than_warm_up(launches: Launches) -> None:
    config, _ = small_model("moondream2")
    cpu = torch.device("cpu")
    make = DeviceCrops(config.vision, Uploader(cpu), ImageUploader(cpu), cpu)
    make.warm_up()
    warm = set(launches.kinds)
    side = config.vision.crop_size
    sizes = ((side, side), (side - 3, side + 5), (2 * side, side - 1))
    images = [
        PreparedImage("", None, (1, 1), w, h, np.zeros((h, w, 3), np.uint8)) for w, h in sizes
    ]
    for count in (1, 2, 3):
        make(images[:count])
    assert launches.kinds == warm


@pytest.mark.slow
@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@torch.inference_mode()
def test_serving_launches_nothing_that_warm_up_did_not(family: str, launches: Launches) -> None:
    config, tensors = small_model(family)
    sizes = {"num_pages": 30, "page_size": 17, "max_batch_size": 3, "max_seq_length": 200}
    layout = SlabLayout(config, torch.float32, torch.device("cpu"))
    runtime = GpuRuntime(config, tensors, Options(adapters=layout, **sizes))
    runtime.parts.decode.warm_up()
    runtime.warm_up_samples()
    runtime.vision.warm_up(1)
    runtime.parts.images.warm_up()
    first = picture("first", (1, 1), config, seed=1)
    runtime.collect(runtime.launch(StepPlan(0, encode=(EncodeSlice(first, 0, first.num_crops),))))
    warm = set(launches.kinds)
    assert {kind[0] for kind in warm} >= {"_flag_kernel", "_keep_kernel", "_pool_tiles"}
    launches.start()

    hidden = torch.zeros(3, config.text.dim)
    for count in range(1, 4):
        flag_rows(hidden[:count], torch.empty(count, 1, dtype=torch.int32))
        for greedy in (True, False):
            for spatial in (True, False):
                runtime.parts.prompt_sampler._sampler(
                    hidden[:count], Variant(count, greedy, spatial)
                )
    variants = runtime.parts.decode.graphs.variants
    assert {variant.adapters for variant in variants} == set(RowAdapters)
    for variant in variants:
        runtime.parts.decode.body(variant)
    tensors = random_tensors(config, 1, 3, only="vision.", vision=True)
    plain = adapter("sight", tensors)
    sight = replace(plain, slabs=layout.pack(plain.weights))
    for step, tiling in enumerate(((1, 2), (2, 1), (2, 2)), 1):
        image = picture(str(tiling), tiling, config, seed=step)
        image = image if step == 1 else image.with_adapter(sight)
        plan = StepPlan(step, encode=(EncodeSlice(image, 0, image.num_crops),))
        runtime.collect(runtime.launch(plan))
    # Prefill.warm_up has a size of each kind of rows for layer_norm; its 2,000 rows take too long here.
    late = {kind for kind in launches.kinds - warm if kind[0] != "_layer_norm_kernel"}
    assert not late, "\n".join(map(str, sorted(late)))
    runtime.close()
