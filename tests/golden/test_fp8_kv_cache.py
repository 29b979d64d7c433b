"""The golden models with keys and values in eight bits: plain attention that rounds alike, and any way to the same end.

Golden checkpoints have no scales; the ones here are as a calibration would make them, the largest of some numbers. No
golden array fits what is rounded, so plain torch stands for them. Where two ways differ by a float32's last digits, a
number may be rounded up by one and down by the other: tolerances are for a few of those.
"""

from collections.abc import Callable

import pytest
import torch

from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import ImageBlock, PreparedImage
from kestrel_engine.types.step import Row
from tests.engine.runtime.rounded_attention import RoundedAttention
from tests.golden.driver import Feed, pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden

CASES = ["query.0", "query_noimage.0", "query_spatial.1"]
FLIPS = {"atol": 5e-3, "rtol": 5e-3}


@pytest.fixture(scope="module", params=["md2", "md3"])
def model(
    request: pytest.FixtureRequest,
    goldens: Callable[[str], Golden],
    pictures: dict[str, PreparedImage],
) -> tuple[Golden, TorchRuntime]:
    """A golden model, and a runtime over its weights whose cache is in eight bits."""
    golden = goldens(request.param)
    with torch.inference_mode():
        runtime = golden.new_runtime(kv_scales=calibrated(golden))
        used = {golden.case(name).get("image") for name in CASES}
        golden.encode(runtime, {name: each for name, each in pictures.items() if name in used})
    return golden, runtime


def calibrated(golden: Golden) -> list[tuple[float, float]]:
    """Scales by which the largest number of one prompt is 448."""
    runtime = golden.new_runtime(num_pages=90)
    Feed(runtime, pages_for(runtime, 60))(*golden.prompt(golden.case("query_noimage.0")))
    cache = runtime.cache
    assert cache is not None
    used = slice(0, 5)
    return [
        (float(keys[used].abs().max()) / 448, float(values[used].abs().max()) / 448)
        for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


@pytest.mark.slow_with("md2", "query.0")
@pytest.mark.parametrize("case_id", CASES)
def test_it_is_plain_attention_over_rounded_numbers(model, case_id: str) -> None:
    golden, runtime = model
    prompt = golden.prompt(golden.case(case_id))
    batch = runtime.batch([Row(0, prompt, 0, pages_for(runtime, 800, seed=3), None)])
    prefix = golden.config.image_prefix if isinstance(prompt[1], ImageBlock) else 0
    plain = RoundedAttention(runtime.cache.scales, prefix)
    expected = runtime.model.text(batch.embeddings, batch.positions, plain)[-1]
    hidden = Feed(runtime, pages_for(runtime, 800, seed=3))(*prompt)
    torch.testing.assert_close(hidden, expected, **FLIPS)
    exact = golden.arrays[f"{case_id}.prefill_hidden"]
    drift = float((hidden - exact).norm() / exact.norm())
    assert 1e-4 < drift < 0.1, "rounding shows, and no more than it should"
