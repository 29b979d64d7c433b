"""What fits on a card, and that the sizing adds up to the factory's own result."""

import re
from pathlib import Path

import pytest
import torch

from kestrel_engine import InsufficientMemoryError, RuntimeConfig, sizing
from kestrel_engine.building import room
from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint, weight_bytes
from kestrel_engine.runtime.gpu import footprint
from kestrel_engine.sizing import GIB, fit
from kestrel_engine.types.model_config import parse_model_config


def config(model="moondream2", **more):
    return RuntimeConfig(model=model, random_weights=True, **({"max_batch_size": None} | more))


def test_the_released_shapes_by_hand():
    found = fit(config(), 24 * GIB)
    assert found.weights_bytes == 2 * 1_927_237_104
    assert (found.page_size, found.max_batch_size, found.max_seq_length) == (10, 64, 2048)
    page_bytes = 2 * 24 * 10 * 2048 * 2
    assert found.pool_bytes == found.num_pages * page_bytes
    room = 24 * GIB - sizing.CONTEXT_BYTES - found.weights_bytes - found.reserve_bytes
    assert found.num_pages == int(0.9 * room) // page_bytes
    assert found.full_sequences == found.num_pages // 205
    assert found.images == found.num_pages // 73


def test_keys_and_values_in_fp8_take_half():
    wide, half = (fit(config(kv_cache_dtype=kind), 24 * GIB) for kind in ("auto", "fp8"))
    assert wide == fit(config(kv_cache_dtype="model"), 24 * GIB)
    assert half.num_pages // 2 == wide.num_pages and wide.pool_bytes <= half.pool_bytes
    assert half.images == half.num_pages // 73


def test_a_card_without_fp8_holds_wide_experts():
    kept, wide = (fit(config("moondream3.1-9b-a2b"), 80 * GIB, fp8=fp8) for fp8 in (True, False))
    assert wide.weights_bytes == 2 * 9_268_626_928
    rows = 20 * 64 * (2048 + 2048)
    assert kept.weights_bytes == wide.weights_bytes - 8_053_063_680 + 4 * rows
    assert kept.num_pages > wide.num_pages


def test_experts_stored_wide_stay_wide_on_every_card():
    preview = config("moondream3-preview")
    assert fit(preview, 80 * GIB) == fit(preview, 80 * GIB, fp8=False)


def test_experts_in_fp8_take_room_for_their_rows():
    """Of each pair of the largest pass its product in FP8, beside the copies of dense weights."""
    plain, fp8 = (config("moondream3-preview", fp8_gemms=which) for which in ("off", "prefill"))
    more = fit(fp8, 80 * GIB).reserve_bytes - fit(plain, 80 * GIB).reserve_bytes
    dense = 4 * (3 * 2048 * 2048 + 2 * 2048 * 8192 + 2048 * 2048) + 20 * 3 * 2048 * 2048
    assert 0 < more - dense - 12_288 * 8 * 1024 < 64 << 20


def test_a_smaller_step_leaves_more_for_the_cache():
    whole, small = fit(config(), 8 * GIB), fit(config(step_crops=1, max_batch_size=4), 8 * GIB)
    assert small.reserve_bytes < whole.reserve_bytes and small.num_pages > whole.num_pages


@pytest.mark.parametrize("keep", [True, False])
def test_the_weights_are_what_loading_makes(keep):
    text = {
        "dim": 64,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 2,
        "ff_dim": 64,
        "vocab_size": 50,
        "moe": {"num_experts": 4, "experts_per_token": 2, "start_layer": 1, "expert_inner_dim": 32},
    }
    vision = {"enc_dim": 32, "enc_n_layers": 1, "enc_ff_dim": 32, "enc_n_heads": 2}
    vision |= {"proj_inner_dim": 32, "proj_out_dim": 64}
    raw = {"config": {"text": text, "vision": vision, "region": {"dim": 64}}}
    model = parse_model_config(raw)
    made = random_checkpoint(
        model, 0, torch.bfloat16, "cpu", keep_fp8=keep, progress=lambda *_: None
    )
    total = sum(tensor.nbytes for tensor in made.tensors.values())
    assert weight_bytes(model, torch.bfloat16, keep_fp8=keep) == total


def test_what_does_not_fit_is_said():
    with pytest.raises(InsufficientMemoryError, match=r"the weights take 9\.8 GiB"):
        fit(config("moondream3.1-9b-a2b"), 8 * GIB)
    with pytest.raises(InsufficientMemoryError, match="an image takes 73 pages"):
        fit(config(), 9 * GIB // 2)


def test_the_reserve_counts_the_largest_step():
    model = parse_model_config({}, family="moondream2")

    def reserve(**settings):
        chosen = config(**settings)
        return room.reserve_of(chosen, model, torch.bfloat16, chosen.sizes(cuda=True))

    few, many = (reserve(step_crops=crops) for crops in (1, 18))
    assert few < many
    adapters = reserve(step_crops=1, adapters_dir=".", adapter_cache_bytes=1 << 20)
    # 16 images of 729 patches, with 8 sums of 128 ranks for the projector's inputs.
    assert adapters == few + (1 << 20) + 16 * 729 * 8 * 128 * 4


def test_the_sums_of_adapters_are_those_of_the_kernels():
    rows = pytest.importorskip("kestrel_engine.kernels.adapters.rows")
    slabs = pytest.importorskip("kestrel_engine.kernels.adapters.slabs")
    assert rows.INPUTS_A_PART == footprint.SHRUNK_INPUTS
    assert slabs.RANKS * slabs.MOST_SLABS * 4 == footprint.SHRUNK_BYTES


def test_the_captured_passes_are_those_of_the_runtime():
    graphs = pytest.importorskip("kestrel_engine.runtime.gpu.prefill.graphs")
    assert (graphs.MAX_BLOCKS, graphs.MAX_TEXT) == (
        footprint.CAPTURED_BLOCKS,
        footprint.CAPTURED_TEXT,
    )


def test_weights_in_fp8_are_counted_before_the_pool():
    def reserve(which, model="moondream2"):
        return fit(config(model, fp8_gemms=which), 24 * GIB).reserve_bytes

    plain = reserve("off")
    vision = 27 * (4 * 4 * 1152 + 4 * 1152**2 + 4 * (4352 + 1152) + 2 * 1152 * 4352)
    prefill = 24 * (4 * 3 * 2048 + 4 * 2048**2 + 4 * (8192 + 2048) + 2 * 2048 * 8192)
    assert (vision, prefill) == (415_148_544, 1_209_532_416)
    # With what the passes need more.
    assert vision <= reserve("vision") - plain < vision + 0.35 * GIB
    assert prefill <= reserve("prefill") - plain < prefill + 0.35 * GIB
    assert vision + prefill <= reserve("all") - plain < vision + prefill + 0.35 * GIB
    # Experts are in FP8 of themselves, or stay as they are: only four layers of Moondream 3 are dense.
    of_md3 = 24 * 3 * 2048 * 2052 + 4 * (8192 * 2052 + 2048 * (8196 + 2048))
    preview = "moondream3.1-9b-a2b"
    found = reserve("prefill", preview) - reserve("off", preview)
    assert of_md3 <= found < of_md3 + 0.35 * GIB
    # Decode steps read proj of the other layers in FP8, too.
    assert reserve("all", preview) - reserve("prefill", preview) == vision + 20 * 2048 * 2052


def test_the_table_in_the_docs_is_what_is_computed():
    """To a tenth of a GiB."""
    page = (Path(__file__).parents[3] / "docs/run/gpus.md").read_text()
    rows = re.findall(r"^\| (\d+) GiB.*? \| `(.+?)` \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) >= 9
    for gib, flags, shown in rows:
        model, *rest = flags.split()
        values = {
            n: int(v) if v.isdigit() else v for n, v in zip(rest[::2], rest[1::2], strict=True)
        }
        settings = {name.removeprefix("--").replace("-", "_"): v for name, v in values.items()}
        found = fit(config(model, **settings), int(gib) * GIB)
        weights, reserve, cache, context, full, images = (
            float(cell.replace(",", "")) for cell in shown.split(" | ")
        )
        assert weights == pytest.approx(found.weights_bytes / GIB, abs=0.1), flags
        assert reserve == pytest.approx(found.reserve_bytes / GIB, abs=0.1), flags
        assert cache == pytest.approx(found.pool_bytes / GIB, abs=0.1), flags
        assert context == found.max_seq_length, flags
        assert full == pytest.approx(found.full_sequences, abs=1), flags
        assert images == pytest.approx(found.images, abs=2), flags
