"""GpuRuntime with adapters gives what TorchRuntime gives, token for token in float32, in mixed batches of both kinds of
passes, captured sizes and others."""

from dataclasses import replace

import pytest
import torch

from kestrel_engine.kernels.linear.skinny_tiling import MAX_ROWS
from kestrel_engine.runtime.gpu.adapters import decode_changes
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout
from kestrel_engine.runtime.gpu.text import decode_step
from kestrel_engine.types.requests import ImageBlock
from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.adapters.random_adapters import adapter, random_tensors
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime
from tests.engine.runtime.gpu.test_gpu_runtime import DEVICE, SIZES, TEXT, Talk, answers

pytestmark = pytest.mark.usefixtures("checked_addresses")


def adapters_of(config, layout, *shapes):
    """An adapter for each (seed, rank, part of the names), in both forms. Experts have lower ranks."""
    made = []
    for seed, rank, only in shapes:
        tensors = {
            name: tensor
            for its_rank in (rank, rank // 5)
            for name, tensor in random_tensors(config, seed, its_rank, only=only).items()
            if (its_rank == rank) == (tensor.dim() == 2)
        }
        plain = adapter(f"{seed}", tensors)
        made.append(replace(plain, slabs=layout.pack(plain.weights)))
    return made


def with_input_change(config, layout):
    """An adapter of the MLPs, and one that changes proj by the block's normalised input, in both forms."""
    tensors = random_tensors(config, 3, 9, only="attn.proj") | random_tensors(
        config, 3, 4, only="0.mlp"
    )
    plain = adapter("3", {name.replace("proj.", "proj@input."): t for name, t in tensors.items()})
    return replace(plain, slabs=layout.pack(plain.weights))


class Tuned(Talk):
    """A Talk with an adapter."""

    def __init__(self, number, prompt, rules, own, **options):
        super().__init__(number, prompt, rules, **options)
        self.adapter = own

    def _row(self, tokens, *, samples):
        return replace(super()._row(tokens, samples=samples), adapter=self.adapter)


def mixed(config, first, second, third):
    look = [0, ImageBlock("single", config.image_positions)]
    return [
        Tuned(0, [0, 21, 22, 23], [TEXT] * 3, first),
        Tuned(1, [0, 21, 22, 23], [TEXT] * 3, None),
        Tuned(2, [0, 21, 22, 23], [TEXT] * 3, second, chunk=2),
        Tuned(3, [*look, 11, 12], [TEXT] * 3, second),
        Tuned(4, [*look, 11, 12], [TEXT] * 3, first),
        Tuned(5, [0, 21, 22, 23], [TEXT] * 3, third),
    ]


def ids(found):
    return {number: [token.id for token in tokens] for number, tokens in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "most_rows"),
    [
        ("moondream2", MAX_ROWS),
        pytest.param("moondream3", MAX_ROWS, marks=pytest.mark.slow),
        pytest.param("moondream2", 2, marks=pytest.mark.slow),
        pytest.param("moondream3", 2, marks=pytest.mark.slow),
    ],
)
def test_mixed_requests(family, most_rows, monkeypatch):
    """``most_rows``: of a decode step whose changes are no launches of their own."""
    for module in (decode_step, decode_changes):
        monkeypatch.setattr(module, "MAX_ROWS", most_rows)
    if most_rows < MAX_ROWS:
        monkeypatch.setattr(decode_step, "MAX_TOKENS", most_rows)
        monkeypatch.setattr(decode_step, "INLINE_TAU_ROWS", most_rows)
    config, tensors = small_model(family)
    layout = SlabLayout(config, torch.float32, torch.device(DEVICE))
    first, second = adapters_of(config, layout, (1, 5, "attn"), (2, 35, ""))
    third = with_input_change(config, layout)
    reference = torch_runtime(config, tensors, **SIZES)
    tested = gpu_runtime(config, tensors, adapters=layout, **SIZES)
    try:
        single = picture("single", (1, 1), config, seed=2)
        for runtime in (reference, tested):
            runtime.collect(
                runtime.launch(StepPlan(0, encode=(EncodeSlice(single, 0, single.num_crops),)))
            )
        wanted, got = (
            ids(answers(runtime, mixed(config, first, second, third)))
            for runtime in (reference, tested)
        )
        assert got == wanted
        assert len({tuple(wanted[i]) for i in (0, 1, 2, 5)}) == 4, "the adapters change nothing"
        # Rows whose adapters change MLPs only have passes of their own.
        (mlps,) = adapters_of(config, layout, (4, 20, ".mlp."))
        wanted, got = (
            ids(
                answers(
                    runtime,
                    [
                        Tuned(0, [0, 21, 22, 23], [TEXT] * 3, mlps),
                        Tuned(1, [0, 21, 22, 23], [TEXT] * 3, None),
                    ],
                )
            )
            for runtime in (reference, tested)
        )
        assert got == wanted and wanted[0] != wanted[1]
        # Rows without adapters afterwards: nothing remains.
        again = ids(answers(tested, [Tuned(1, [0, 21, 22, 23], [TEXT] * 3, None)]))
        assert again[1] == wanted[1]
    finally:
        tested.close()
        reference.close()
