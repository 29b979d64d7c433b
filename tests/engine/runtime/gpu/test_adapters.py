"""GpuRuntime with adapters gives what TorchRuntime gives, token for token in float32, in mixed batches of both kinds of
passes, captured sizes and others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.adapters.random_adapters import adapter, random_tensors
from tests.engine.runtime.gpu.small_models import picture, small_model
from tests.engine.runtime.gpu.test_gpu_runtime import DEVICE, SIZES, TEXT, Talk, answers


def adapters_of(config, layout, *shapes):
    """An adapter of the dense MLPs for each (seed, rank), in both forms."""
    made = []
    for seed, rank in shapes:
        dense = [f"blocks.{layer}.mlp." for layer in range(len(layout.mlps))]
        tensors = {
            name: tensor
            for name, tensor in random_tensors(config, seed, rank, only=".mlp.").items()
            if any(each in name for each in dense)
        }
        plain = adapter(f"{seed}", tensors)
        made.append(replace(plain, slabs=layout.pack(plain.weights)))
    return made


class Tuned(Talk):
    """A Talk with an adapter."""

    def __init__(self, number, prompt, rules, own, **options):
        super().__init__(number, prompt, rules, **options)
        self.adapter = own

    def _row(self, tokens, *, samples):
        return replace(super()._row(tokens, samples=samples), adapter=self.adapter)


def mixed(config, first, second):
    look = [0, ImageBlock("single", config.image_positions)]
    return [
        Tuned(0, [0, 21, 22, 23], [TEXT] * 5, first),
        Tuned(1, [0, 21, 22, 23], [TEXT] * 5, None),
        Tuned(2, [0, 21, 22, 23], [TEXT] * 5, second, chunk=2),
        Tuned(3, [*look, 11, 12], [TEXT] * 4, second),
        Tuned(4, [*look, 11, 12], [TEXT] * 4, first),
    ]


def ids(found):
    return {number: [token.id for token in tokens] for number, tokens in found.items()}


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@pytest.mark.slow_with("moondream3")
def test_mixed_requests(family):
    config, tensors = small_model(family)
    layout = SlabLayout(config.text, torch.float32, torch.device(DEVICE))
    first, second = adapters_of(config, layout, (1, 5), (2, 35))
    reference = TorchRuntime(
        Moondream(config, tensors), config, device="cpu", dtype=torch.float32, **SIZES
    )
    own = {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}
    tested = GpuRuntime(config, own, adapters=layout, **SIZES)
    try:
        single = picture("single", (1, 1), config, seed=2)
        for runtime in (reference, tested):
            runtime.collect(
                runtime.launch(StepPlan(0, encode=(EncodeSlice(single, 0, single.num_crops),)))
            )
        wanted, got = (
            ids(answers(runtime, mixed(config, first, second))) for runtime in (reference, tested)
        )
        assert got == wanted
        assert len({tuple(wanted[i]) for i in range(3)}) == 3, "the adapters change nothing"
        # Rows without adapters afterwards: nothing remains.
        again = ids(answers(tested, [Tuned(1, [0, 21, 22, 23], [TEXT] * 5, None)]))
        assert again[1] == wanted[1]
    finally:
        tested.close()
        reference.close()
