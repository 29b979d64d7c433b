"""Prompts with several images against a plain model: one dense pass with the whole mask, for every token anew."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_engine.models.moondream import Moondream
from kestrel_engine.skills.text.answer import AnswerControl
from kestrel_engine.types.requests import ImageBlock, Prompt, Token, num_positions
from tests.golden.driver import Feed, pages_for
from tests.golden.goldens import Golden

pytestmark = pytest.mark.golden

QUESTION = (1, 375, 2, 50, 92, 61, 3)
"""Any ids will do."""


def mask_of(prompt: Sequence[Token]) -> Tensor:
    """[T, T] bool, True where a position attends to another: causal, and each image's positions to one another; the BOS
    before the first one is one of them."""
    kinds: list[int] = []
    for index, token in enumerate(prompt):
        if isinstance(token, ImageBlock):
            kinds += [index] * token.num_positions
        else:
            kinds.append(1 if index == 0 and isinstance(prompt[1], ImageBlock) else -1 - index)
    kind = torch.tensor(kinds)
    causal = torch.ones(len(kinds), len(kinds), dtype=torch.bool).tril()
    return causal | (kind[:, None] == kind[None])


@dataclass(frozen=True)
class DenseAttention:
    mask: Tensor

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(0, 1)


def plain_hidden(model: Moondream, images: dict[str, Tensor], prompt: Sequence[Token]) -> Tensor:
    """[T, dim]: the residual stream at all positions of ``prompt``, in one pass without pages, spans or caches."""
    parts = [
        images[token.key]
        if isinstance(token, ImageBlock)
        else model.text.embed(torch.tensor([token]))
        for token in prompt
    ]
    x = torch.cat(parts)
    return model.text(x, torch.arange(len(x)), DenseAttention(mask_of(prompt)))


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=1e-5)


def prompts(golden: Golden) -> dict[str, Prompt]:
    def image(key: str) -> ImageBlock:
        return ImageBlock(key, golden.config.image_positions)

    square, gray = image("square_378"), image("gray_640x480")
    return {
        "two at the beginning": (0, square, gray, *QUESTION),
        "one in each turn": (0, square, *QUESTION, 700, 701, gray, *QUESTION),
        "one after text": (0, *QUESTION, 700, gray, *QUESTION),
        "the same twice": (0, square, square, *QUESTION),
    }


NAMES = ("two at the beginning", "one in each turn", "one after text", "the same twice")


@pytest.mark.slow_with("md2", "two at the beginning", "the same twice")
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_equals_the_plain_model(golden: Golden, name: str) -> None:
    runtime, prompt = golden.runtime, prompts(golden)[name]
    expected = plain_hidden(runtime.model, runtime.images, prompt)[-1]
    feed = Feed(runtime, pages_for(runtime, 1600, seed=3))
    assert_same(feed(*prompt), expected)


@pytest.mark.slow_with("md2", 1, 73)
@pytest.mark.parametrize("page_size", [1, 10, 73])
def test_pieces_and_pages_change_nothing(golden: Golden, page_size: int) -> None:
    """Each image in a row of its own, or with text before and after it in its row."""
    prompt = prompts(golden)["one in each turn"]
    runtime = golden.new_runtime(page_size=page_size, num_pages=-(-1700 // page_size))
    runtime.images.update(golden.runtime.images)
    expected = plain_hidden(golden.runtime.model, golden.runtime.images, prompt)[-1]
    second = prompt.index(prompts(golden)["one after text"][9])
    for cuts in ((2, second, second + 1), (5, second + 4), (second - 2, second + 1)):
        feed = Feed(runtime, pages_for(runtime, 1600, seed=page_size))
        begin = 0
        for end in (*cuts, len(prompt)):
            hidden = feed(*prompt[begin:end])
            begin = end
        assert_same(hidden, expected)


def assert_plain_answer(golden: Golden, prompt: Prompt, answer: Sequence[int], most: int) -> None:
    """``answer`` is the greedy one: in a pass over all of it each token follows from those before it."""
    model, control = golden.runtime.model, AnswerControl(golden.context)
    hidden = plain_hidden(model, golden.runtime.images, [*prompt, *answer])
    all_logits = model.text.logits(hidden[-1 - len(answer) :])
    eos = golden.config.ids.eos_id
    wanted = list(answer) if len(answer) == most else [*answer, eos]
    for index, (logits, token) in enumerate(zip(all_logits, wanted, strict=False)):
        rule = control.rule(index)
        assert rule.allowed is None and rule.forced is None
        logits[list(rule.suppressed)] = -torch.inf
        assert int(logits.argmax()) == token, index


@pytest.mark.slow
async def test_the_engine_answers_as_the_plain_model(
    golden: Golden, golden_folder: Callable[[str], Path], golden_images: Path
) -> None:
    """A question that compares two images, alone and beside others; then one in each turn of a conversation."""
    codec, templates = golden.context.codec, golden.config.templates
    ids, length = golden.config.ids, golden.config.image_positions
    names = ("square_378", "gray_640x480")
    first, second = (ImageBlock(name, length) for name in names)
    files = [next(golden_images.glob(f"{name}.*")) for name in names]
    asked = "Which image has more circles?"

    def rendered(question: str) -> list[int]:
        return [*templates.query_prefix, *codec.encode(question), *templates.query_suffix]

    settings = {"temperature": 0.0, "max_tokens": 8}
    prompt = (ids.bos_id, first, second, *rendered(asked))
    config = RuntimeConfig(
        model_path=golden_folder(golden.name), device="cpu", dtype="float32", cpu_threads=1
    )
    async with await InferenceEngine.create(config) as engine:
        alone = await engine.query(files, asked, settings=settings)
        assert_plain_answer(golden, prompt, alone.token_ids, 8)
        assert len(set(alone.token_ids)) > 1, "a model that says one thing shows little"
        assert alone.metrics.input_tokens == num_positions(prompt)
        await engine.flush_caches()
        others = [
            engine.query(files, asked, settings=settings),
            engine.query(files, asked, settings=settings),
            engine.query(files[::-1], asked, settings=settings),
            engine.query(files[1], asked, settings=settings),
            engine.query(None, asked, settings=settings),
        ]
        together = await asyncio.gather(*others)
        assert together[0].token_ids == together[1].token_ids == alone.token_ids
        # The question is the same text after other images.
        assert len({result.token_ids for result in together}) > 2
        history = [(asked, "The first."), ("Sure?", "Yes.")]
        arguments = {"question": "Both?", "history": history, "image_turns": [0, 1]}
        stream = await engine.submit("query", files, arguments, settings)
        result = await stream.result()
        turns = [*rendered(asked), *codec.encode("The first."), second, *rendered("Sure?")]
        prompt = (ids.bos_id, first, *turns, *codec.encode("Yes."), *rendered("Both?"))
        assert_plain_answer(golden, prompt, result.token_ids, 8)
        assert result.metrics.cached_tokens >= 1 + length


def test_an_image_attends_to_what_precedes_it_only(golden: Golden) -> None:
    """What follows an image changes none of its keys; what precedes it changes all."""
    mask = mask_of((0, ImageBlock("a", 3), ImageBlock("b", 2), 7))
    assert mask.int().tolist() == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1, 1],
    ]
