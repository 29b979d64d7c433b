"""Both models in bfloat16 by teacher forcing, within the manifest's measures: mean and largest error, cosine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kestrel_engine.types.requests import Coord, PreparedImage, Size
from tests.golden.checks import Case, fed_tokens
from tests.golden.driver import Feed, pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden
Pair = tuple[str, Tensor, Tensor]


def region_pairs(golden: Golden, feed: Feed, hidden: Tensor, case: Case) -> Iterator[Pair]:
    """Region logits of a first object, the stored bins being fed."""
    region, name = feed.runtime.model.region, f"{case['id']}.first"
    x, y, *sides = case["bins"][0]
    yield "region_logits", region.coord_logits(hidden), golden.arrays[f"{name}.x_logits"][None]
    hidden = feed(Coord(x / 1024))[None]
    yield "region_logits", region.coord_logits(hidden), golden.arrays[f"{name}.y_logits"][None]
    hidden = feed(Coord(y / 1024))[None]
    if sides:
        stored = golden.arrays[f"{name}.size_logits"]
        yield "region_logits", region.size_logits(hidden)[0], stored


def compared(
    golden: Golden, cases: list[Case], pictures: dict[str, PreparedImage]
) -> Iterator[Pair]:
    """(what, bf16 rows, stored rows) over ``cases`` and ``pictures``, which has theirs. The image embeddings are
    those that the runtime keeps for its prompts."""
    runtime = golden.new_runtime(dtype=torch.bfloat16)
    golden.encode(runtime, pictures)
    model = runtime.model
    rows = golden.expected["rows"]["image_emb_rows"]
    for name in pictures:
        stored = golden.arrays[f"vision.{name}.image_emb_rows"]
        yield "image_emb", runtime._images[name][rows], stored
    for case in cases:
        feed = Feed(runtime, pages_for(runtime, 850, seed=5))
        prompt = golden.prompt(case)
        hidden = feed(*prompt)[None]
        stored = golden.arrays[f"{case['id']}.prefill_hidden"][None]
        yield "prefill_hidden", hidden, stored
        stored = golden.arrays[f"{case['id']}.prefill_logits"][None]
        yield "prefill_logits", model.text.logits(hidden), stored
        coords = [token.value for token in prompt if isinstance(token, Coord)]
        sizes = [(token.width, token.height) for token in prompt if isinstance(token, Size)]
        if coords:
            embedded = model.region.embed_coords(torch.tensor(coords))
            yield "ref_embeds", embedded, golden.arrays[f"{case['id']}.ref_coord_embeds"]
        if sizes:
            embedded = model.region.embed_sizes(torch.tensor(sizes))
            yield "ref_embeds", embedded, golden.arrays[f"{case['id']}.ref_size_embeds"]
        if case["skill"] in ("point", "detect"):
            yield from region_pairs(golden, feed, hidden, case)
        elif f"{case['id']}.decode_logits" in golden.arrays:
            stored = golden.arrays[f"{case['id']}.decode_logits"]
            fed = fed_tokens(case)[: len(stored)]
            logits = model.text.logits(torch.stack([feed(token) for token in fed]))
            yield "decode_logits", logits, stored


@pytest.mark.parametrize(
    ("golden", "chosen"),
    [
        ("md3", ("query.0", "detect.0", "segment.0")),
        pytest.param("md2", None, marks=pytest.mark.slow),
        pytest.param("md3", None, marks=pytest.mark.slow),
    ],
    indirect=["golden"],
)
@pytest.mark.slow
def test_errors_stay_within_the_manifest(
    golden: Golden, pictures: dict[str, PreparedImage], chosen: tuple[str, ...] | None
) -> None:
    """Of three cases that measure every error, with their images; or of all cases and images."""
    cases = [c for c in golden.expected["cases"] if chosen is None or c["id"] in chosen]
    used = {case.get("image") for case in cases}
    images = {name: each for name, each in pictures.items() if name in used or chosen is None}
    limits = golden.tolerances["bf16"]
    flip_margin = limits["teacher_forced_argmax_must_match_when_margin_at_least"]
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for what, actual, stored in compared(golden, cases, images):
        assert bool(actual.isfinite().all())
        pairs[what].append((actual.float(), stored))
    assert pairs.keys() == {"image_emb", "prefill_hidden", "prefill_logits", "decode_logits"} | {
        "region_logits",
        "ref_embeds",
    }
    for what, several in pairs.items():
        actual, stored = (torch.cat(side) for side in zip(*several, strict=True))
        error = (actual - stored).abs()
        cosine = torch.nn.functional.cosine_similarity(actual.double(), stored.double(), dim=-1)
        measured = (float(error.mean()), float(error.max()), float(cosine.min()))
        allowed = limits[what]
        assert measured[0] <= allowed["mean_abs"], (what, measured)
        assert measured[1] <= allowed["max_abs"], (what, measured)
        assert measured[2] >= allowed["cos_min"], (what, measured)
        if what.endswith("_logits"):
            best = stored.topk(2, dim=-1).values
            clear = best[:, 0] - best[:, 1] >= flip_margin
            same = actual.argmax(dim=-1) == stored.argmax(dim=-1)
            assert bool(same[clear].all()), (what, "an argmax with a clear margin flipped")
