"""The sizes of passes beside decode steps; tests/gpu has the lanes themselves."""

from kestrel_engine.config.runtime import RuntimeConfig
from kestrel_engine.config.sizes import default_sizes
from kestrel_engine.runtime.gpu.lanes import LEAST_CROPS, PassSizes
from kestrel_engine.runtime.gpu.prefill.graphs import MAX_BLOCKS


def test_the_default_target_leaves_the_largest_step_whole():
    found = PassSizes.beside(RuntimeConfig().itl_target_ms)
    assert found == (default_sizes(cuda=True).step_crops, MAX_BLOCKS)


def test_lower_targets_make_smaller_passes():
    assert PassSizes.beside(7.5) == (24, 3)
    assert PassSizes.beside(5.0) == (16, 2)
    assert PassSizes.beside(0.0) == (LEAST_CROPS, 1)
