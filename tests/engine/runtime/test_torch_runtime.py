"""The torch runtime on small random models: plans, images, failures. Exactness is tested in tests/golden."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kestrel_engine.models.moondream import Moondream
from kestrel_engine.runtime import torch_runtime
from kestrel_engine.runtime.batch import build_batch
from kestrel_engine.runtime.kv_cache import KvCache, bytes_per_page
from kestrel_engine.runtime.protocol import Runtime
from kestrel_engine.runtime.thread_choice import ThreadChoice, forget_passes, limited
from kestrel_engine.runtime.torch_runtime import TorchRuntime
from kestrel_engine.types.requests import Coord, ImageBlock, PreparedImage, SamplingParams, Size
from kestrel_engine.types.step import (
    NEAR_BINS,
    PREVIOUS,
    EncodeSlice,
    Row,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenRule,
)
from tests.engine.models.small import random_tensors, small_config

GREEDY = SamplingParams()
IMAGE = ImageBlock("picture", 25)


@pytest.fixture(params=["moondream2", "moondream3"])
def runtime(request) -> TorchRuntime:
    return new_runtime(request.param)


def new_runtime(family="moondream3", dtype=torch.float32, **options) -> TorchRuntime:
    config = small_config(family)
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config).items()}
    settings = {"num_pages": 60, "page_size": 4, "max_batch_size": 4, "max_seq_length": 120}
    model = Moondream(config, tensors)
    return TorchRuntime(model, config, device="cpu", dtype=dtype, **settings | options)


def picture(key: str = "picture", tiling: tuple[int, int] = (1, 2)) -> PreparedImage:
    count = 1 + tiling[0] * tiling[1]
    crops = np.random.default_rng(1).integers(0, 256, (count, 30, 30, 3), dtype=np.uint8)
    return PreparedImage(key, crops, tiling, 60, 30)


def whole(image: PreparedImage) -> EncodeSlice:
    return EncodeSlice(image, 0, image.num_crops)


def spec(rule: TokenRule | None = None, draw: int = 0, **sampling: float) -> SampleSpec:
    return SampleSpec(rule or TokenRule(), SamplingParams(**sampling), draw)


def row(tokens, start=0, first_page=0, sample=None, sequence_id=0, pages=10) -> Row:
    return Row(
        sequence_id, tuple(tokens), start, tuple(range(first_page, first_page + pages)), sample
    )


def step(runtime: Runtime, **parts) -> StepResult:
    return runtime.collect(runtime.launch(StepPlan(0, **parts)))


def test_empty_steps_and_rows_that_want_nothing(runtime):
    assert step(runtime).tokens == {}
    assert step(runtime, prefill=(row([0, 30, 31]),)).tokens == {}
    assert step(runtime, encode=(whole(picture()),), drop_images=("picture",)).tokens == {}


def test_encode_prefill_and_decode_share_a_step(runtime):
    first = step(
        runtime,
        encode=(whole(picture()),),
        prefill=(
            row([0, IMAGE, 30, 31], sample=spec(), sequence_id=1),
            row([0, 33], first_page=10, sample=spec(), sequence_id=2),
        ),
    )
    assert set(first.tokens) == {1, 2}
    assert first.vision_s > 0 and first.prefill_s > 0
    second = step(
        runtime,
        prefill=(row([0, IMAGE, 40], first_page=20, sample=spec(), sequence_id=3),),
        decode=(
            row([first.tokens[1].as_input()], 28, 0, spec(draw=1), 1),
            row([first.tokens[2].as_input()], 2, 10, spec(draw=1), 2),
        ),
    )
    assert set(second.tokens) == {1, 2, 3}
    assert second.decode_s > 0
    assert all(token.logprob <= 0 for token in second.tokens.values())


def test_values_are_read_only_where_rule_and_id_say_so(runtime):
    coord, size = 5, 6
    tokens = [0, 30, 31]

    def sampled(rule: TokenRule):
        return step(runtime, prefill=(row(tokens, sample=spec(rule)),)).tokens[0]

    x = sampled(TokenRule(forced=coord, read_coord=True))
    assert x.id == coord and isinstance(x.value, Coord) and x.value.value * 64 % 1 == 0
    box = sampled(TokenRule(forced=size, read_size=True))
    assert box.id == size and isinstance(box.value, Size)
    assert 2**-10 <= box.value.width <= 1
    assert x.logprob == box.logprob == 0.0 and 0 < x.near < 1 and 0 < box.near < 1
    assert sampled(TokenRule(forced=coord)).value is None
    assert sampled(TokenRule(forced=coord)).logprob == 0.0
    assert sampled(TokenRule(forced=coord, read_size=True)).value is None
    assert sampled(TokenRule(suppressed=(coord, size), read_coord=True)).value is None
    either = sampled(TokenRule(otherwise=coord, stop=59, read_coord=True))
    assert either.value == x.value or either.id == 59


def test_region_heads_read_the_stream_before_the_last_layer_norm(runtime):
    rows = [row([0, 30, 31])]
    hidden = runtime.hidden(rows)
    expected = int(runtime.model.region.coord_logits(hidden).argmax())
    rule = TokenRule(forced=5, read_coord=True)
    token = step(runtime, prefill=(row([0, 30, 31], sample=spec(rule)),)).tokens[0]
    assert token.value == Coord(expected / 64)


def test_the_probability_near_a_value_is_that_of_the_bins_around_it(runtime):
    hidden = runtime.hidden([row([0, 30, 31])])
    region = runtime.model.region
    (x,) = region.coord_logits(hidden).softmax(dim=-1).tolist()
    ((w, h),) = region.size_logits(hidden).softmax(dim=-1).tolist()

    def near(probabilities):
        best = probabilities.index(max(probabilities))
        return sum(probabilities[max(0, best - NEAR_BINS) : best + NEAR_BINS + 1])

    coord, size = (
        step(runtime, prefill=(row([0, 30, 31], sample=spec(rule)),)).tokens[0]
        for rule in (TokenRule(forced=5, read_coord=True), TokenRule(forced=6, read_size=True))
    )
    assert coord.near == pytest.approx(near(x), abs=1e-6)
    assert size.near == pytest.approx(near(w) * near(h), abs=1e-6)


def test_a_image_stays_until_it_is_dropped(runtime):
    def prompt(number: int) -> Row:
        return row([0, IMAGE, 30], sample=spec(), sequence_id=number)

    with pytest.raises(AssertionError, match="picture was not encoded"):
        step(runtime, prefill=(prompt(1),))
    first = step(runtime, encode=(whole(picture()),), prefill=(prompt(2),))
    assert step(runtime, prefill=(prompt(2),)).tokens == first.tokens
    step(runtime, drop_images=("picture", "never seen"))
    with pytest.raises(AssertionError, match="picture was not encoded"):
        step(runtime, prefill=(prompt(3),))


def test_a_device_without_memory_raises_memory_error(runtime, monkeypatch):
    def refuse(self, plan):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchRuntime, "_step", refuse)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        step(runtime, prefill=(row([0, 30], sample=spec()),))


def test_what_builds_on_a_failed_step_is_left_out_of_those_launched_behind_it(runtime):
    bad, good = (row([0, 30 + i], first_page=10 * i, sample=spec(), sequence_id=i) for i in (1, 2))
    poison = row([0, ImageBlock("other", 25)], first_page=40, sequence_id=3)
    image = picture()
    expected = step(runtime, prefill=(good,)).tokens
    plans = [
        StepPlan(0, encode=(EncodeSlice(image, 0, 2),), prefill=(bad, poison)),
        StepPlan(
            1,
            encode=(EncodeSlice(image, 2, 3),),
            prefill=(good,),
            decode=(row([PREVIOUS], 2, 10, spec(draw=1), 1),),
        ),
    ]
    handles = [runtime.launch(plan) for plan in plans]
    with pytest.raises(AssertionError, match="other was not encoded"):
        runtime.collect(handles[0])
    assert runtime.collect(handles[1]).tokens == expected
    # The image may be begun again; the sequences were ended.
    prompt = row([0, IMAGE, 30], sample=spec(), sequence_id=4)
    assert 4 in step(runtime, ended=(1, 3), encode=(whole(image),), prefill=(prompt,)).tokens


def test_what_is_dropped_goes_first_so_a_image_may_be_encoded_anew_in_the_same_step(runtime):
    prompt = row([0, IMAGE, 30], sample=spec())
    first = step(runtime, encode=(whole(picture()),), prefill=(prompt,))
    again = step(runtime, drop_images=("picture",), encode=(whole(picture()),), prefill=(prompt,))
    assert again.tokens == first.tokens


@pytest.mark.parametrize("tiling", [(1, 1), (1, 2), (2, 3)])
def test_a_image_encoded_crop_by_crop_equals_one_encoded_at_once(runtime, tiling):
    image = picture(tiling=tiling)
    prompt = row([0, IMAGE, 30], sample=spec(temperature=1.0))
    expected = step(runtime, encode=(whole(image),), prefill=(prompt,)).tokens[0]
    other = picture("other")
    for first in range(image.num_crops):
        pieces = [EncodeSlice(image, first, first + 1)]
        if first == 0:
            pieces.append(whole(other))
        step(runtime, encode=tuple(pieces))
    found = step(runtime, prefill=(prompt,)).tokens[0]
    assert (found.id, found.value) == (expected.id, expected.value)
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_row_may_be_launched_before_the_token_that_it_feeds_is_known(runtime):
    rules = [TokenRule(forced=5, read_coord=True), TokenRule(), TokenRule()]
    known = []
    feed = row([0, 30, 31], sample=spec(rules[0]))
    for draw, rule in enumerate(rules[1:], start=1):
        known.append(step(runtime, prefill=(feed,)).tokens[0])
        feed = row([known[-1].as_input()], 2 + draw, sample=spec(rule, draw))
    known.append(step(runtime, decode=(feed,)).tokens[0])

    handles = [runtime.launch(StepPlan(0, prefill=(row([0, 30, 31], sample=spec(rules[0])),)))]
    for draw, rule in enumerate(rules[1:], start=1):
        ahead = row([PREVIOUS], 2 + draw, sample=spec(rule, draw))
        handles.append(runtime.launch(StepPlan(draw, decode=(ahead,))))
    assert [runtime.collect(handle).tokens[0] for handle in handles] == known
    step(runtime, ended=(0, 99))
    with pytest.raises(KeyError):
        step(runtime, decode=(row([PREVIOUS], 5, sample=spec()),))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row([IMAGE, 30], start=1), "not in the row of its BOS"),
        (row([]), "without tokens"),
        (row([0, 30], first_page=58), "pages outside"),
        (row([0] * 30, pages=2), "2 pages of 4 for 30"),
        (row([0, 30], pages=60), "limit 120"),
        (row([0, ImageBlock("picture", 24)]), r"\(25, 24\)"),
    ],
)
def test_a_wrong_plan_is_an_assertion_with_numbers_and_the_runtime_goes_on(runtime, bad, message):
    good = row([0, 30, 31], first_page=30, sample=spec(), sequence_id=7)
    before = step(runtime, encode=(whole(picture()),), prefill=(good,))
    with pytest.raises(AssertionError, match=message):
        step(runtime, prefill=(bad,))
    assert step(runtime, prefill=(good,)).tokens == before.tokens


def test_a_row_that_is_not_finite_is_named_and_the_others_are_as_without_it(runtime):
    good = row([0, 30, 31], sample=spec(), sequence_id=1)
    expected = step(runtime, prefill=(good,)).tokens
    runtime.model.text.wte[44] = float("nan")
    bad = row([0, 44], first_page=20, sample=spec(), sequence_id=2)
    result = step(runtime, prefill=(good, bad))
    assert (result.tokens.keys(), result.non_finite) == ({1}, {2})
    assert result.tokens[1].id == expected[1].id
    # What was launched meanwhile of the bad one is left out.
    after = row([PREVIOUS], start=2, first_page=20, sample=spec(draw=1), sequence_id=2)
    assert step(runtime, decode=(after,)).tokens == {}
    assert step(runtime, prefill=(good,)).tokens == expected


def test_stale_numbers_in_pages_are_never_read(runtime):
    """Pages come uninitialised and go from hand to hand: what others left there must not matter."""
    good = row([0, 30, 31], first_page=5, sample=spec(), sequence_id=1)
    follow = row([32], 3, 5, spec(draw=1), 1)
    expected = [step(runtime, prefill=(good,)).tokens, step(runtime, decode=(follow,)).tokens]
    poisoned = runtime.model.text.wte[44].clone()
    runtime.model.text.wte[44] = float("nan")
    step(runtime, prefill=(row([44] * 40, first_page=5),))
    runtime.model.text.wte[44] = poisoned
    again = [step(runtime, prefill=(good,)).tokens, step(runtime, decode=(follow,)).tokens]
    assert again == expected


def test_seeded_draws_do_not_depend_on_the_batch(runtime):
    hot = {"temperature": 2.0, "top_p": 0.95}
    rows = [
        row([0, 30 + i], first_page=10 * i, sample=spec(draw=3, seed=i, **hot), sequence_id=i)
        for i in range(4)
    ]
    together = step(runtime, prefill=tuple(rows)).tokens
    for i in reversed(range(4)):
        alone = step(runtime, prefill=(rows[i],)).tokens[i]
        assert alone.id == together[i].id
        assert alone.logprob == pytest.approx(together[i].logprob, abs=1e-4)


def test_steps_are_collected_as_they_were_launched(runtime):
    plans = [StepPlan(i, prefill=(row([0, 30 + i], sample=spec()),)) for i in range(2)]
    first, second = (runtime.launch(plan) for plan in plans)
    with pytest.raises(AssertionError, match="collected as launched"):
        runtime.collect(second)
    assert runtime.collect(first).tokens and runtime.collect(second).tokens


def test_close_frees_and_may_be_repeated(runtime):
    step(runtime, encode=(whole(picture()),))
    runtime.close()
    runtime.close()
    with pytest.raises(AssertionError, match="closed"):
        step(runtime, prefill=(row([0, 30]),))


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
def test_half_types(family):
    half = new_runtime(family, torch.bfloat16)
    rule = TokenRule(forced=5, read_coord=True)
    result = step(
        half,
        encode=(whole(picture()),),
        prefill=(
            row([0, IMAGE, Coord(0.5), Size(0.1, 0.2), 31], sample=spec(rule)),
            row([0, 32], first_page=20, sample=spec(), sequence_id=1),
        ),
    )
    assert isinstance(result.tokens[0].value, Coord) and result.tokens[1].logprob <= 0


def test_pool_layout_and_size():
    config = small_config("moondream3").text
    cache = KvCache(
        config, num_pages=7, page_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    assert cache.keys.shape == cache.values.shape == (3, 28, 2, 16)
    assert cache.keys.nbytes + cache.values.nbytes == 7 * bytes_per_page(config, 4, torch.bfloat16)
    assert cache.slots((2, 3, 4), 10) == slice(8, 18)
    scattered = cache.slots((5, 0, 6), 10)
    assert scattered.tolist() == [20, 21, 22, 23, 0, 1, 2, 3, 24, 25]
    with pytest.raises(AssertionError, match="1 pages of 4 for 5"):
        cache.slots((1,), 5)


@pytest.fixture
def threads_of_passes(monkeypatch):
    """The number of torch's threads in each pass, of two."""
    seen = []

    def noting(*args):
        seen.append(torch.get_num_threads())
        return build_batch(*args)

    monkeypatch.setattr(torch_runtime, "build_batch", noting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield seen
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def prefill_and_decode(runtime, decodes=1):
    step(runtime, prefill=(row([0, 30, 31], sample=spec()),))
    for i in range(decodes):
        step(runtime, decode=(row([30], start=3 + i, sample=spec()),))


@pytest.mark.parametrize(("small_pass", "threads"), [(10**9, 1), (0, 2)])
def test_only_small_passes_run_on_one_thread(
    threads_of_passes, runtime, monkeypatch, small_pass, threads
):
    monkeypatch.setattr(torch_runtime, "SMALL_PASS", small_pass)
    prefill_and_decode(runtime, decodes=6)
    assert threads_of_passes == [threads] * 7


def test_decode_in_half_types_tries_one_thread(monkeypatch, threads_of_passes, moved_clock):
    monkeypatch.setattr(torch_runtime, "SMALL_PASS", 0)
    prefill_and_decode(new_runtime(dtype=torch.bfloat16), decodes=6)
    assert threads_of_passes[:6] == [2, 2, 2, 2, 2, 1]


def test_a_pass_limits_no_thread_of_another_model(threads_of_passes):
    another = new_runtime()
    with ThreadPoolExecutor(1) as earlier, ThreadPoolExecutor(1) as later:
        earlier.submit(forget_passes).result()
        with limited(1):
            assert earlier.submit(torch.get_num_threads).result() == 2
            later.submit(forget_passes).result()
            assert later.submit(torch.get_num_threads).result() == 2
            prefill_and_decode(another)
            assert another._device_thread.submit(torch.get_num_threads).result() == 2


def test_the_faster_number_of_threads_is_chosen():
    choice, seconds = ThreadChoice(8), {8: 0.1, 1: 0.2}
    used = []

    def run(passes):
        used.clear()
        for _ in range(passes):
            used.append(choice.next())
            choice.took(seconds[used[-1]])
        return used.count(1) / passes

    assert run(1000) < 0.02  # idle cores
    seconds[8] = 0.9
    run(130)
    assert run(1000) > 0.98
    seconds[8] = 0.1
    run(130)
    assert run(1000) < 0.02
