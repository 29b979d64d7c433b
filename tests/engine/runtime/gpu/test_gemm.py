"""Float32 is computed as float32, and what runs in fewer bits is not called so."""

import pytest
import torch

from kestrel_engine.runtime.gpu.gemm import require_exact
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.text.options import TextOptions
from kestrel_engine.runtime.gpu.vision.tower import FusedVision
from kestrel_engine.runtime.gpu.weights import pack_weights
from tests.engine.models.small import random_tensors, small_config


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_torch_does_not_take_tf32_unless_told_to():
    assert not torch.backends.cuda.matmul.allow_tf32
    require_exact(torch.float32)


def test_a_float32_model_is_refused_where_tf32_is_on(tf32):
    config = small_config("moondream2")
    tensors = pack_weights(config, random_tensors(config))
    with pytest.raises(AssertionError, match="float32 products are high"):
        FusedText(config.text, tensors, TextOptions(max_rows=1, page_size=5))
    with pytest.raises(AssertionError, match="float32 products are high"):
        FusedVision(config.vision, tensors)
    require_exact(torch.bfloat16)
