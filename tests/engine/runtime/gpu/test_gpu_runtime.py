"""GpuRuntime gives what TorchRuntime gives: token for token in float32, whatever the batch, the sampling or the skill.

Without a GPU Triton interprets the kernels, so the models are small.
"""

import random
from dataclasses import replace

import pytest
import torch

from kestrel_engine.types.embedding import EmbeddingSpec
from kestrel_engine.types.requests import Coord, ImageBlock, SamplingParams, Size, num_positions
from kestrel_engine.types.step import (
    PREVIOUS,
    EncodeSlice,
    ImageRead,
    LogitEdit,
    Row,
    SampleSpec,
    StepPlan,
    TokenRule,
)
from tests.engine.runtime.gpu.small_models import (
    both_ways,
    gpu_runtime,
    picture,
    small_model,
    torch_runtime,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, PAGES = 17, 60
SIZES = {"num_pages": PAGES, "page_size": PAGE, "max_batch_size": 6, "max_seq_length": 200}

TEXT = TokenRule(suppressed=(3,))
POINT_X = TokenRule(allowed=(5, 0), read_coord=True)
POINT_Y = TokenRule(allowed=(5,), read_coord=True)
SIDES = TokenRule(forced=6, read_size=True)
WIDE = TokenRule(allowed=tuple(range(5, 60)))
"""More ids than a kernel's rule has room for."""


@pytest.fixture(params=["moondream2", "moondream3"], scope="module")
def both(request):
    """The config, a TorchRuntime and a GpuRuntime with equal weights, holding images "wide" and "single"."""
    config, tensors = small_model(request.param)
    reference = torch_runtime(config, tensors, **SIZES)
    tested = gpu_runtime(config, tensors, **SIZES)
    with_crops, with_pixels = both_ways("wide", 140, 60, config, seed=1)
    assert with_crops.tiling == (1, 3)
    single = picture("single", (1, 1), config, seed=2)
    for runtime, wide in ((reference, with_crops), (tested, with_pixels)):
        # The wide one's crops come over two steps; the tested runtime makes them itself.
        plans = [
            StepPlan(0, encode=(EncodeSlice(wide, 0, 3), EncodeSlice(single, 0, 2))),
            StepPlan(1, encode=(EncodeSlice(wide, 3, 4),)),
        ]
        for plan in plans:
            runtime.collect(runtime.launch(plan))
    yield config, reference, tested
    tested.close()
    reference.close()


@pytest.mark.slow_with("moondream3")
def test_crops_alone_go_through_the_passes_of_steps(both, monkeypatch):
    config, _, tested = both
    side = config.vision.crop_size
    crops = torch.randint(0, 255, (3, side, side, 3), dtype=torch.uint8, device=DEVICE)
    wanted = tested.vision.encode_crops(crops)
    torch.testing.assert_close(tested.encode_crops(crops), wanted, atol=1e-4, rtol=1e-4)
    # Where there are graphs, theirs: the tower itself isn't asked.
    monkeypatch.setattr(tested.parts.images, "encode_crops", lambda crops: crops.sum())
    assert tested.encode_crops(crops) == crops.sum()


class Talk:
    """One sequence in both runtimes: rules and prompt are given, what was sampled is kept."""

    def __init__(self, number, prompt, rules, sampling=None, *, chunk=None):
        self.number, self.prompt, self.rules = number, tuple(prompt), rules
        self.sampling = sampling or SamplingParams()
        self.chunk = chunk
        total = num_positions(self.prompt) + len(rules)
        rng = random.Random(number)
        self.pages = tuple(rng.sample(range(number * 8, number * 8 + 8), -(-total // PAGE)))
        self.fed = self.position = self.sampled = 0

    def rows(self):
        """(prefill row or None, decode row or None) of the next step."""
        if self.fed < len(self.prompt):
            end = min(len(self.prompt), self.fed + (self.chunk or len(self.prompt)))
            tokens = self.prompt[self.fed : end]
            self.fed = end
            return self._row(tokens, samples=end == len(self.prompt)), None
        if self.sampled == len(self.rules):
            return None, None
        return None, self._row((PREVIOUS,), samples=True)

    def _row(self, tokens, *, samples):
        spec = None
        if samples:
            spec = SampleSpec(self.rules[self.sampled], self.sampling, self.sampled)
            self.sampled += 1
        start = self.position
        self.position += sum(1 if t is PREVIOUS else num_positions((t,)) for t in tokens)
        table = self.pages[: -(-self.position // PAGE)]
        return Row(self.number, tokens, start, table, spec)


def answers(runtime, talks, first_step=10, named=None):
    """{sequence: [StepToken]}, two steps being out at a time. ``named`` gets the sequences whose numbers are not
    finite, which go no further."""
    named = set() if named is None else named
    out = {talk.number: [] for talk in talks}
    pending = []

    def collect():
        result = runtime.collect(pending.pop(0))
        named.update(result.non_finite)
        assert not result.non_finite & result.tokens.keys()
        for number, token in result.tokens.items():
            out[number].append(token)

    step = first_step
    while True:
        rows = [talk.rows() for talk in talks if talk.number not in named]
        prefill = tuple(p for p, _ in rows if p is not None)
        decode = tuple(d for _, d in rows if d is not None)
        if not (prefill or decode):
            break
        pending.append(runtime.launch(StepPlan(step, prefill=prefill, decode=decode)))
        step += 1
        if len(pending) == 2:
            collect()
    while pending:
        collect()
    runtime.collect(runtime.launch(StepPlan(step, ended=tuple(out))))
    return out


def compare(both, make):
    config, reference, tested = both
    wanted, got = (answers(runtime, make(config)) for runtime in (reference, tested))
    for number, tokens in wanted.items():
        assert [(t.id, t.value) for t in got[number]] == [(t.id, t.value) for t in tokens], number
        assert [t.logprob for t in got[number]] == pytest.approx(
            [t.logprob for t in tokens], abs=2e-4
        )
        for token, other in zip(got[number], tokens, strict=True):
            assert [i for i, _ in token.top] == [i for i, _ in other.top], number
            assert [p for _, p in token.top] == pytest.approx([p for _, p in other.top], abs=2e-4)
    return wanted


def image(config, key):
    return [0, ImageBlock(key, config.image_positions)]


@pytest.mark.slow_with("moondream2")
def test_text_and_images_of_all_kinds_in_one_batch(both):
    def make(config):
        wide, single = image(config, "wide"), image(config, "single")
        return [
            Talk(0, [*wide, 11, 12, 13], [TEXT] * 4),
            Talk(1, [0, 21, 22, 23, 24], [TEXT] * 3, chunk=3),
            Talk(2, single, [POINT_X, POINT_Y, SIDES, POINT_X]),
            Talk(3, [*wide, Coord(0.25), Coord(0.5), Size(0.1, 0.75), 41], [TEXT] * 2),
        ]

    wanted = compare(both, make)
    assert [t.value is not None for t in wanted[2]][1:3] == [True, True]
    assert len({t.id for t in wanted[0] + wanted[1]}) > 3, (
        "a model that says one thing shows little"
    )


def with_several_images(config, *, chunk=None):
    wide, single = image(config, "wide"), image(config, "single")
    return [
        Talk(0, [*wide, single[1], 11, 12, 13], [TEXT] * 2, chunk=chunk),
        Talk(1, [*single, 21, 22, wide[1], single[1], 23], [TEXT] * 2, chunk=chunk),
        Talk(2, [0, 31, 32, wide[1], 33, Coord(0.5)], [TEXT] * 2, chunk=chunk),
        Talk(3, [*wide, 41], [POINT_X, POINT_Y, SIDES], chunk=chunk and 2),
        Talk(4, [0, 51, 52], [TEXT] * 2),
    ]


@pytest.mark.slow_with("moondream2")
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_prompts_with_several_images_among_others(both, chunk):
    wanted = compare(both, lambda config: with_several_images(config, chunk=chunk))
    assert len({tuple(t.id for t in tokens) for tokens in wanted.values()}) == 5


@pytest.mark.slow_with("moondream2")
def test_sampled_rows_draw_what_the_reference_draws(both):
    def make(config):
        hot = [
            SamplingParams(temperature=1.0, top_p=0.9, seed=5),
            SamplingParams(temperature=0.7, top_k=8, seed=6),
            SamplingParams(temperature=1.5, seed=2**63 - 1),
        ]
        talks = [Talk(i, [0, 20 + i, 30], [TEXT] * 3, s) for i, s in enumerate(hot)]
        return [*talks, Talk(3, [0, 33], [TEXT] * 3)]

    compare(both, make)


@pytest.mark.slow_with("moondream2")
def test_rules_with_long_lists(both):
    def make(config):
        hot = SamplingParams(temperature=1.0, seed=9)
        return [
            Talk(0, [0, 20], [WIDE] * 2),
            Talk(1, [0, 22], [WIDE, TEXT, WIDE], hot),
            Talk(2, [0, 24], [TEXT] * 2),
        ]

    compare(both, make)


@pytest.mark.slow_with("moondream2")
def test_masks_edits_and_min_p(both):
    """Rows with a constraint or a penalty, beside one without. Edits and min-p need the reference sampler."""

    def make(config):
        mask = bytearray(TokenRule.mask_bytes(config.text.vocab_size))
        mask[2:6] = 0b10110101, 255, 0, 129
        masked = TokenRule(mask=bytes(mask))
        edits = tuple(LogitEdit(i, bias=0.1 * (i % 7), penalty=1.5, minus=0.3) for i in range(40))
        hot = SamplingParams(temperature=1.0, seed=9, min_p=0.02)
        return [
            Talk(0, [0, 20], [masked] * 3),
            Talk(1, [0, 22], [masked, TEXT, TokenRule(mask=bytes(mask), edits=edits)], hot),
            Talk(2, [0, 24], [TEXT] * 3),
            Talk(3, [0, 26], [TokenRule(edits=edits)] * 3),
        ]

    compare(both, make)


@pytest.mark.slow_with("moondream3")
def test_the_likeliest_ids_of_rows_that_ask_for_them(both):
    """After a prompt and after captured passes, beside rows that do not ask; one is drawn by the reference sampler."""
    top = replace(TEXT, top=5)
    edited = TokenRule(edits=(LogitEdit(9, bias=1.0),), top=4)

    def make(config):
        hot = SamplingParams(temperature=1.0, seed=9)
        return [
            Talk(0, [0, 20], [top] * 3),
            Talk(1, [0, 22], [TEXT] * 3),
            Talk(2, [0, 24], [replace(TEXT, top=20), edited, top], hot),
            Talk(3, [0, 26], [top, replace(WIDE, top=7), TokenRule(forced=9, top=3)]),
        ]

    wanted = compare(both, make)
    assert [[len(token.top) for token in wanted[number]] for number in range(4)] == [
        [5, 5, 5],
        [0, 0, 0],
        [20, 4, 5],
        [5, 7, 0],
    ]
    assert all(token.top[0] == (token.id, token.logprob) for token in wanted[0])


@pytest.mark.slow_with("moondream3")
def test_a_sequence_alone_and_in_a_batch_says_the_same(both):
    config, _, tested = both
    prompts = [[*image(config, "wide"), 11], [0, 12, 13], [0, 14]]
    together = answers(tested, [Talk(i, p, [TEXT] * 3) for i, p in enumerate(prompts)])
    for i, prompt in enumerate(prompts[:2]):
        alone = answers(tested, [Talk(i, prompt, [TEXT] * 3)])
        assert [t.id for t in alone[i]] == [t.id for t in together[i]]


@pytest.mark.slow_with("moondream2")
def test_a_device_without_memory_raises_memory_error(both, monkeypatch):
    _, _, tested = both

    def refuse(plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tested, "_enqueue", refuse)
    row = Row(43, (0, 9), 0, (51,), SampleSpec(TEXT, SamplingParams(), 0))
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        tested.launch(StepPlan(911, prefill=(row,)))
    monkeypatch.undo()
    compare(both, lambda config: [Talk(0, [0, 9], [TEXT] * 2)])


@pytest.mark.slow_with("moondream2")
def test_a_image_that_is_not_there_fails_its_step_only(both):
    config, _, tested = both
    row = Row(42, tuple(image(config, "unknown")), 0, (51,), SampleSpec(TEXT, SamplingParams(), 0))
    with pytest.raises(AssertionError, match="unknown was not encoded"):
        tested.launch(StepPlan(910, prefill=(row,)))
    compare(both, lambda config: [Talk(0, [0, 9], [TEXT] * 2)])


def test_embeddings_are_those_of_the_reference(both):
    config, reference, tested = both
    spec = EmbeddingSpec(crops=True, patches=True)
    with_crops, with_pixels = both_ways("embedded", 140, 60, config, seed=3)
    found = []
    for runtime, image in ((reference, with_crops), (tested, with_pixels)):
        image = replace(image, keeps_features=True)
        plans = [
            StepPlan(0, encode=(EncodeSlice(image, 0, 2),)),
            StepPlan(
                1,
                encode=(EncodeSlice(image, 2, 4),),
                reads=(ImageRead(1, image, spec), ImageRead(2, image, EmbeddingSpec(half=True))),
            ),
            StepPlan(2, drop_images=("embedded",)),
        ]
        results = [runtime.collect(runtime.launch(plan)) for plan in plans]
        found.append(results[1].readings)
    wanted, got = found
    assert got[1].crops.shape == (4, 16, config.text.dim)
    for name in ("image", "crops"):
        torch.testing.assert_close(
            torch.from_numpy(getattr(got[1], name)),
            torch.from_numpy(getattr(wanted[1], name)),
            atol=1e-4,
            rtol=1e-4,
        )
    assert got[2].image.dtype == wanted[2].image.dtype == "float16" and got[2].crops is None
