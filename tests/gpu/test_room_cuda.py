"""Passes that leave room for decode steps, and decode steps at intervals."""

import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kestrel_engine import RuntimeConfig
from kestrel_engine.building.factory import build
from kestrel_engine.kernels.spacing import spaced
from kestrel_engine.runtime.gpu.room import ROOM, can_leave_room
from kestrel_engine.runtime.gpu.runtime import GpuRuntime
from kestrel_engine.runtime.gpu.vision.graphs import WITH_ROOM, CropPassShape
from tests.kernels.attention.attention_cases import relative_error


def test_a_spaced_step_begins_some_time_after_the_one_before():
    last = torch.zeros(1, dtype=torch.int64, device="cuda")
    spaced(last, 0.004)
    begins = []
    for _ in range(3):
        spaced(last, 0.004)
        begins.append(int(last))
    gaps = [later - earlier for earlier, later in itertools.pairwise(begins)]
    assert all(4_000_000 <= gap < 12_000_000 for gap in gaps), gaps


def test_a_clock_that_was_set_back_delays_a_step_by_little():
    last = torch.full((1,), 2**62, dtype=torch.int64, device="cuda")
    spaced(last, 0.004)
    torch.cuda.synchronize()
    last.fill_(2**62)
    began = time.perf_counter()
    spaced(last, 0.004)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.5
    assert int(last) < 2**62


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_passes_that_leave_room_compute_the_same(precision: str):
    if not can_leave_room(torch.device("cuda"), torch.bfloat16):
        pytest.skip("needs a Hopper GPU")
    config = RuntimeConfig(
        model="moondream2",
        random_weights=True,
        device="cuda",
        precision=precision,
        kv_cache_pages=400,
        max_batch_size=2,
    )
    runtime = build(config).runtime
    assert isinstance(runtime, GpuRuntime)
    try:
        graphs = runtime.parts.vision_graphs
        assert graphs is not None
        for count in (1, WITH_ROOM.start - 1, WITH_ROOM.start, 48):
            shape = CropPassShape(count, with_room=True)
            assert (shape in graphs.graphs) == (count in WITH_ROOM)
        side = runtime._config.vision.crop_size
        crops = torch.randint(0, 255, (48, side, side, 3), dtype=torch.uint8, device="cuda")
        with torch.inference_mode():
            plain = graphs.encode_crops(crops)
            roomy = graphs.encode_crops(crops, leave_room=True)
        assert torch.isfinite(roomy.float()).all()
        assert relative_error(roomy, plain) < 0.03
        kernels = _kernels(lambda: graphs.encode_crops(crops, leave_room=True))
        grids = {
            kernel["args"]["grid"][0] * kernel["args"]["grid"][1]
            for kernel in kernels
            if "nvjet" in kernel["name"]
        }
        most = torch.cuda.get_device_properties(0).multi_processor_count - ROOM
        assert grids and max(grids) <= most, grids
        assert torch._C._get_sm_carveout_experimental() is None, "other GEMMs have the whole device"
    finally:
        runtime.close()


def _kernels(body: Callable[[], object]) -> list[dict[str, Any]]:
    """Returns the profiler's events of the kernels that ``body`` runs."""
    with warnings.catch_warnings():
        # It says that it forgets earlier cycles.
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            body()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]
