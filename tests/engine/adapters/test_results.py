"""Rows with different adapters, and without one, share passes, and each gets the result of merged weights."""

import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.adapter import Adapter
from kestrel_engine.types.model_config import Family
from kestrel_engine.types.step import Row
from tests.engine.adapters.random_adapters import adapter, merged, random_tensors
from tests.engine.models import small

PROMPTS = [(0, 30, 31, 32), (0, 41, 9), (0, 30, 31, 32), (0, 12, 13, 14, 15), (0, 30, 31, 32)]
LENGTH = 12


def runtime_of(family: Family, tensors: dict[str, torch.Tensor]) -> TorchRuntime:
    model = Moondream(small.small_config(family), tensors)
    return TorchRuntime(
        model, model.config, device="cpu", dtype=torch.float32,
        num_pages=60, page_size=4, max_batch_size=8, max_seq_length=120,
    )  # fmt: skip


def generate(
    runtime: TorchRuntime, prompts: list[tuple[int, ...]], adapters: list[Adapter | None]
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, all rows in one pass for each token, and the last hidden states."""
    try:
        tables = [tuple(range(10 * i, 10 * i + 10)) for i in range(len(prompts))]
        rows = [Row(i, p, 0, tables[i], None, adapters[i]) for i, p in enumerate(prompts)]
        tokens: list[list[int]] = [[] for _ in prompts]
        for _ in range(LENGTH):
            hidden = runtime.hidden(rows)
            ids = runtime.model.text.logits(hidden).argmax(dim=-1).tolist()
            for own, token in zip(tokens, ids, strict=True):
                own.append(token)
            ends = [row.start + len(row.tokens) for row in rows]
            rows = [
                Row(i, (ids[i],), ends[i], tables[i], None, adapters[i]) for i in range(len(ids))
            ]
        return tokens, hidden
    finally:
        runtime.close()


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
@pytest.mark.slow_with("moondream2")
def test_a_mixed_batch_equals_merged_weights(family: Family) -> None:
    config = small.small_config(family)
    weights = small.random_tensors(config)
    first = random_tensors(config, 1, rank=4)
    second = random_tensors(config, 2, rank=9, only=".mlp.")
    given = [first, None, second, first, None]
    loaded = {id(t): adapter(str(n), t) for n, t in enumerate((first, second))}
    adapters = [None if t is None else loaded[id(t)] for t in given]
    mixed, hidden = generate(runtime_of(family, weights), PROMPTS, adapters)
    assert len({tuple(mixed[i]) for i in (0, 2, 4)}) == 3, "the adapters change nothing"
    for i, tensors in enumerate(given):
        whole = weights if tensors is None else merged(weights, tensors)
        expected, state = generate(runtime_of(family, whole), [PROMPTS[i]], [None])
        assert [mixed[i]] == expected
        torch.testing.assert_close(hidden[i], state[0], rtol=2e-4, atol=2e-4)
        if tensors is None:
            continue
        alone, _ = generate(runtime_of(family, weights), [PROMPTS[i]], [adapters[i]])
        assert alone == expected


def test_a_batch_without_adapters_takes_the_usual_path() -> None:
    runtime = runtime_of("moondream3", small.random_tensors(small.small_config("moondream3")))
    assert runtime.batch([Row(0, (0, 30), 0, (0, 1), None)]).adapters is None
    runtime.close()


def test_a_variant_changes_proj_by_the_normalised_input() -> None:
    """As moondream.md section 11.1: the change of mixer.out_proj reads what qkv reads."""
    config = small.small_config("moondream2")
    weights = small.random_tensors(config)
    name = "text.blocks.1.attn.proj"
    tensors = random_tensors(config, 3, only=name)
    quirk = {k.replace("proj.", "proj@input."): v for k, v in tensors.items()}
    block = Moondream(config, weights).text.blocks[1]
    made = adapter("quirk", quirk)
    x = torch.randn(3, config.text.dim)

    def dense(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v

    from kestrel_engine.models.low_rank import token_adapters

    place = Moondream(config, weights).text.place(torch.arange(3))
    given = token_adapters([(1, None), (2, made.weights)], torch.device("cpu"))
    plain, changed = block(x, place, dense), block(x, place, dense, given)
    u = block.ln(x)
    delta = u @ (tensors[f"{name}.B"] @ tensors[f"{name}.A"]).T
    assert torch.equal(plain[0], changed[0])
    torch.testing.assert_close(changed[1:] - plain[1:], delta[1:])
