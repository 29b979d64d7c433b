"""Both models in bfloat16 by teacher forcing, within the manifest's measures: mean and largest error, cosine.

Where a router is near a tie, the rounding of a processor's bfloat16 decides which expert a token gets. The token is
another one from there on. The manifest's limits of decode_logits allow for such tokens, so other rows of such a token
are judged by their least cosine. float32 shows that the router was near a tie.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kestrel_engine.models.low_rank import TextAdapters
from kestrel_engine.models.region import RegionModel
from kestrel_engine.models.text import Moe
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import Coord, PreparedImage, Size, Token
from tests.golden.checks import Case, fed_tokens
from tests.golden.driver import Feed, pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden
NEAR_TIE = 0.1
"""Between router logits. Their standard deviation is about 1."""


class Row(NamedTuple):
    """``flipped``: in bfloat16, the token got other experts than in float32."""

    what: str
    actual: Tensor
    stored: Tensor
    flipped: bool


class Side:
    """A sequence in bfloat16, and in float32 if there are experts."""

    def __init__(self, golden: Golden, runtime: TorchRuntime, exact: TorchRuntime | None) -> None:
        self._golden = golden
        self._feeds = [
            Feed(each, pages_for(each, 850, seed=5)) for each in (runtime, exact) if each
        ]

    def __call__(self, *tokens: Token) -> tuple[Tensor, bool]:
        """The hidden state after ``tokens``, and whether the last token got other experts."""
        found = [router_logits(feed, tokens) for feed in self._feeds]
        hidden, flipped = found[0][0], False
        if len(found) == 2:
            k = self._golden.config.text.moe.experts_per_token
            for some, exact in zip(found[0][1], found[1][1], strict=True):
                own, right = (set(each.topk(k).indices.tolist()) for each in (some, exact))
                if own != right:
                    lost, got = exact[list(right - own)], exact[list(own - right)]
                    assert float(lost.max() - got.min()) < NEAR_TIE, (lost, got)
                    flipped = True
                    break  # Later layers see another token.
        return hidden, flipped


def router_logits(feed: Feed, tokens: tuple[Token, ...]) -> tuple[Tensor, list[Tensor]]:
    """The hidden state after ``tokens``, and the last one's router logits [experts], float32, of each layer."""
    noted, served = [], Moe.__call__

    def noting(moe: Moe, u: Tensor, adapters: TextAdapters | None = None) -> Tensor:
        noted.append(moe.router(u)[-1].float())
        return served(moe, u, adapters)

    with patch.object(Moe, "__call__", noting):
        return feed(*tokens), noted


def region_rows(
    golden: Golden, region: RegionModel, side: Side, last: tuple[Tensor, bool], case: Case
) -> Iterator[Row]:
    """Region logits of a first object, the stored bins being fed. ``last``: what ``side`` gave for the prompt."""
    name = f"{case['id']}.first"
    x, y, *sides = case["bins"][0]
    hidden, flipped = last
    stored = golden.arrays[f"{name}.x_logits"][None]
    yield Row("region_logits", region.coord_logits(hidden[None]), stored, flipped)
    hidden, flipped = side(Coord(x / 1024))
    stored = golden.arrays[f"{name}.y_logits"][None]
    yield Row("region_logits", region.coord_logits(hidden[None]), stored, flipped)
    hidden, flipped = side(Coord(y / 1024))
    if sides:
        stored = golden.arrays[f"{name}.size_logits"]
        yield Row("region_logits", region.size_logits(hidden[None])[0], stored, flipped)


def compared(
    golden: Golden, cases: list[Case], pictures: dict[str, PreparedImage]
) -> Iterator[Row]:
    """The rows of ``cases`` and ``pictures``, which has theirs. The image embeddings are those that the runtime keeps
    for its prompts."""
    runtime = golden.new_runtime(dtype=torch.bfloat16)
    golden.encode(runtime, pictures)
    exact = None
    if golden.config.text.moe is not None:
        exact = golden.new_runtime()
        golden.encode(exact, pictures)
    model = runtime.model
    rows = golden.expected["rows"]["image_emb_rows"]
    for name in pictures:
        stored = golden.arrays[f"vision.{name}.image_emb_rows"]
        yield Row("image_emb", runtime.images[name][rows], stored, False)
    for case in cases:
        side = Side(golden, runtime, exact)
        prompt = golden.prompt(case)
        hidden, flipped = last = side(*prompt)
        stored = golden.arrays[f"{case['id']}.prefill_hidden"][None]
        yield Row("prefill_hidden", hidden[None], stored, flipped)
        stored = golden.arrays[f"{case['id']}.prefill_logits"][None]
        yield Row("prefill_logits", model.text.logits(hidden[None]), stored, flipped)
        coords = [token.value for token in prompt if isinstance(token, Coord)]
        sizes = [(token.width, token.height) for token in prompt if isinstance(token, Size)]
        if coords:
            embedded = model.region.embed_coords(torch.tensor(coords))
            stored = golden.arrays[f"{case['id']}.ref_coord_embeds"]
            yield Row("ref_embeds", embedded, stored, False)
        if sizes:
            embedded = model.region.embed_sizes(torch.tensor(sizes))
            stored = golden.arrays[f"{case['id']}.ref_size_embeds"]
            yield Row("ref_embeds", embedded, stored, False)
        if case["skill"] in ("point", "detect"):
            yield from region_rows(golden, model.region, side, last, case)
        elif f"{case['id']}.decode_logits" in golden.arrays:
            stored = golden.arrays[f"{case['id']}.decode_logits"]
            for token, wanted in zip(fed_tokens(case), stored, strict=False):
                hidden, flipped = side(token)
                yield Row("decode_logits", model.text.logits(hidden[None]), wanted[None], flipped)


@pytest.mark.slow
def test_errors_stay_within_the_manifest(
    golden: Golden, pictures: dict[str, PreparedImage]
) -> None:
    """Of all cases and images."""
    limits = golden.tolerances["bf16"]
    flip_margin = limits["teacher_forced_argmax_must_match_when_margin_at_least"]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in compared(golden, golden.expected["cases"], pictures):
        assert bool(row.actual.isfinite().all())
        found[row.what].append(row)
    assert found.keys() == {"image_emb", "prefill_hidden", "prefill_logits", "decode_logits"} | {
        "region_logits",
        "ref_embeds",
    }
    for what, several in found.items():
        actual, stored = (
            torch.cat([side.float() for side in sides])
            for sides in ([row.actual for row in several], [row.stored for row in several])
        )
        flipped = torch.tensor([row.flipped for row in several for _ in row.actual])
        if what == "decode_logits":
            flipped[:] = False
        assert int(flipped.sum()) <= max(1, len(flipped) // 20), (what, "experts flipped")
        kept = ~flipped
        error = (actual - stored).abs()
        cosine = torch.nn.functional.cosine_similarity(actual.double(), stored.double(), dim=-1)
        measured = (float(error.mean()), float(error[kept].max()), float(cosine[kept].min()))
        allowed = limits[what]
        assert measured[0] <= allowed["mean_abs"], (what, measured)
        assert measured[1] <= allowed["max_abs"], (what, measured)
        assert measured[2] >= allowed["cos_min"], (what, measured)
        least = limits["decode_logits"]["cos_min"]
        assert bool((cosine[flipped] >= least).all()), (what, cosine[flipped])
        if what.endswith("_logits"):
            best = stored.topk(2, dim=-1).values
            clear = kept & (best[:, 0] - best[:, 1] >= flip_margin)
            same = actual.argmax(dim=-1) == stored.argmax(dim=-1)
            assert bool(same[clear].all()), (what, "an argmax with a clear margin flipped")
