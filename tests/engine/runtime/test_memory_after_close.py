"""A closed runtime holds no tensors, also if its owner keeps it: a model that was unloaded frees its memory."""

import gc

import pytest
import torch

from kestrel_engine.types.step import EncodeSlice, StepPlan
from tests.engine.runtime.gpu.small_models import gpu_runtime, picture, small_model, torch_runtime

SIZES = {"num_pages": 60, "page_size": 17, "max_batch_size": 4, "max_seq_length": 200}


def bytes_of_tensors() -> int:
    gc.collect()
    # By the type: isinstance would call the properties of lazy modules.
    found = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = [tensor.untyped_storage() for tensor in found]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def opened(kind: str):
    config, tensors = small_model("moondream2")
    return (torch_runtime if kind == "torch" else gpu_runtime)(config, tensors, **SIZES)


@pytest.mark.parametrize("kind", ["torch", "kernels"])
def test_a_closed_runtime_holds_no_tensors(kind):
    opened(kind).close()  # What is loaded once and stays.
    before = bytes_of_tensors()
    runtime = opened(kind)
    image = picture("single", (1, 1), small_model("moondream2")[0], seed=2)
    runtime.collect(runtime.launch(StepPlan(0, encode=(EncodeSlice(image, 0, 2),))))
    assert bytes_of_tensors() > before + 500_000
    runtime.close()
    runtime.close()
    assert bytes_of_tensors() <= before + 10_000
