"""The residual stream after every block, router logits and tau factors, where the reference stored them."""

from __future__ import annotations

import pytest
import torch

from kestrel_engine.models.text import Moe
from kestrel_engine.step import Row
from tests.golden.driver import pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("case_id", ["query.0", "query_noimage.0"])
def test_blocks(golden: Golden, case_id: str):
    case, text = golden.case(case_id), golden.runtime.model.text
    row = Row(0, golden.prompt(case), 0, pages_for(golden.runtime, 800), None)
    batch = golden.runtime.batch([row])
    placement, x = text.place(batch.positions), batch.embeddings
    prompt = slice(case["pos_start"], None)
    for block in text.blocks:
        u = block.ln(x)
        if isinstance(block.mlp, Moe):
            layer = block.index - golden.config.text.moe.start_layer
            stored = golden.arrays[f"{case_id}.router_logits"][layer]
            torch.testing.assert_close(
                block.mlp.router(u)[prompt], stored, **golden.tolerances["fp32"]["logits"]
            )
        if block.index == 0 and block.tau is not None:
            of_q, of_v = block.tau.factors(block.qkv(u), placement.log_position)
            golden.check("hidden", of_q[prompt], f"{case_id}.block0.tau_q")
            golden.check("hidden", of_v[prompt], f"{case_id}.block0.tau_v")
        x = block(x, placement, batch.attention)
        name = f"{case_id}.block{block.index}.hidden"
        golden.check("hidden", x[prompt][-len(golden.arrays[name]) :], name)
        image_rows = f"{name}_image_rows"
        if image_rows in golden.arrays:
            golden.check("hidden", x[golden.expected["hidden_image_rows"]], image_rows)
