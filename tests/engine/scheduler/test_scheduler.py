"""The scheduler against the fake runtime: order, limits, pages, rollback; torch-free."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_engine.requests import ImageBlock, PreparedImage, SamplingParams
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_engine.scheduler.scheduler import Scheduler, StepBudget
from kestrel_engine.scheduler.sequence import Phase, Sequence
from kestrel_engine.step import RuntimeLimits, TokenRule

LIMITS = RuntimeLimits(
    num_pages=40, page_size=5, max_batch_size=3, max_seq_length=60, vocab_size=1000
)


def picture(key: str, crops: int = 2) -> PreparedImage:
    return PreparedImage(key, np.zeros((crops, 2, 2, 3), np.uint8), (1, 1), 2, 2)


def sequence(
    number: int, *, text: int = 3, max_tokens: int = 4, image: str | None = None
) -> Sequence:
    block = () if image is None else (ImageBlock(image, 9),)
    return Sequence(
        sequence_id=number,
        prompt=(0, *block, *(100 * number + i for i in range(text))),
        image=None if image is None else picture(image),
        sampling=SamplingParams(),
        rule=TokenRule(),
        max_tokens=max_tokens,
    )


def run_step(scheduler: Scheduler, runtime: FakeRuntime, generated: dict[int, list[int]]) -> bool:
    """One step; sequences end at their max_tokens. False if there was nothing to do."""
    plan = scheduler.schedule()
    scheduler.check()
    if plan is None:
        return False
    for item, token in scheduler.commit(plan, runtime.collect(runtime.launch(plan))):
        generated.setdefault(item.sequence_id, []).append(token.id)
        if item.num_sampled == item.max_tokens:
            scheduler.finish(item.sequence_id)
        else:
            scheduler.resume(item.sequence_id, TokenRule())
        scheduler.check()
    return True


def drain(scheduler: Scheduler, runtime: FakeRuntime) -> dict[int, list[int]]:
    generated: dict[int, list[int]] = {}
    while run_step(scheduler, runtime, generated):
        pass
    return generated


def alone(item: Sequence) -> list[int]:
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    scheduler.add(item)
    return drain(scheduler, runtime)[item.sequence_id]


def test_a_batch_gives_what_each_gives_alone():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    for i in range(1, 8):
        scheduler.add(sequence(i, text=i, max_tokens=1 + i % 4, image="p" if i % 2 else None))
    together = drain(scheduler, runtime)
    for i in range(1, 8):
        expected = alone(sequence(i, text=i, max_tokens=1 + i % 4, image="p" if i % 2 else None))
        assert together[i] == expected
    assert scheduler.num_free_pages == LIMITS.num_pages
    assert max(len(plan.decode) for plan in runtime.plans) > 1


def test_joins_in_order_of_arrival_up_to_the_batch_size():
    scheduler = Scheduler(LIMITS)
    for i in range(1, 6):
        scheduler.add(sequence(i))
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.sequence_id for row in plan.prefill] == [1, 2, 3]
    assert (scheduler.num_running, scheduler.num_waiting) == (3, 2)


def test_waits_for_pages_rather_than_overtaking():
    limits = RuntimeLimits(
        num_pages=12, page_size=5, max_batch_size=3, max_seq_length=60, vocab_size=1000
    )
    scheduler, runtime = Scheduler(limits), FakeRuntime(limits)
    scheduler.add(sequence(1, text=9, max_tokens=30))
    scheduler.add(sequence(2, text=9, max_tokens=30))
    scheduler.add(sequence(3, text=1, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.sequence_id for row in plan.prefill] == [1]
    scheduler.commit(plan, runtime.collect(runtime.launch(plan)))
    scheduler.finish(1)
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.sequence_id for row in plan.prefill] == [2, 3]


def test_a_step_has_a_budget_of_new_work_but_always_takes_one():
    scheduler = Scheduler(LIMITS, StepBudget(prefill_positions=10, crops=3))
    for i in range(1, 4):
        scheduler.add(sequence(i, text=8, image=f"p{i}"))
    plan = scheduler.schedule()
    assert plan is not None
    assert [row.sequence_id for row in plan.prefill] == [1]
    assert plan.prefill[0].start == 0


def test_a_picture_is_encoded_once_a_step_and_dropped_after_its_last_prefill():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    for i in range(1, 4):
        scheduler.add(sequence(i, image="same" if i < 3 else "other"))
    plan = scheduler.schedule()
    assert plan is not None
    assert [image.key for image in plan.encode] == ["same", "other"]
    assert sorted(plan.drop_images) == ["other", "same"]
    runtime.collect(runtime.launch(plan))


def test_abort_frees_in_every_phase():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    items = [sequence(i) for i in range(1, 6)]
    for item in items:
        scheduler.add(item)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan, runtime.collect(runtime.launch(plan)))
    scheduler.resume(1, TokenRule())
    for item in items:  # 1 decodes, 2 and 3 are paused, 4 and 5 wait.
        scheduler.abort(item.sequence_id)
        scheduler.abort(item.sequence_id)
        scheduler.check()
    assert scheduler.num_free_pages == LIMITS.num_pages
    assert not scheduler.has_work
    assert {item.phase for item in items} == {Phase.FINISHED}


def test_a_result_for_an_aborted_sequence_is_dropped():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    scheduler.add(sequence(1))
    plan = scheduler.schedule()
    assert plan is not None
    result = runtime.collect(runtime.launch(plan))
    scheduler.abort(1)
    assert scheduler.commit(plan, result) == []


def test_a_failed_step_ends_its_sequences_and_no_others():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    for i in range(1, 5):
        scheduler.add(sequence(i, image="p"))
    plan = scheduler.schedule()
    assert plan is not None
    assert sorted(scheduler.fail_step(plan)) == [1, 2, 3]
    scheduler.check()
    assert drain(scheduler, runtime)[4] == alone(sequence(4, image="p"))


def test_positions_follow_on_and_pages_cover_them():
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    scheduler.add(sequence(1, text=4, max_tokens=9, image="p"))
    drain(scheduler, runtime)
    rows = [row for plan in runtime.plans for row in (*plan.prefill, *plan.decode)]
    assert [row.start for row in rows] == [0, *range(14, 22)]
    assert all(len(row.page_table) * 5 >= row.start + 1 for row in rows)
    assert [row.sample.draw for row in rows if row.sample] == list(range(9))


def test_what_can_never_fit_is_known_beforehand():
    scheduler = Scheduler(LIMITS)
    assert scheduler.fits(30, 31)
    assert not scheduler.fits(30, 32)
    with pytest.raises(AssertionError, match="fits"):
        scheduler.add(sequence(1, text=59, max_tokens=10))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_arrivals_aborts_and_failures_lose_no_page(data):
    scheduler, runtime = Scheduler(LIMITS), FakeRuntime(LIMITS)
    generated: dict[int, list[int]] = {}
    disturbed: set[int] = set()
    made: dict[int, tuple[int, int, str | None]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "step", "step", "abort", "fail"]))
        if action == "add":
            number = len(made) + 1
            spec = (
                data.draw(st.integers(1, 12)),
                data.draw(st.integers(1, 20)),
                data.draw(st.sampled_from([None, "a", "b"])),
            )
            made[number] = spec
            scheduler.add(sequence(number, text=spec[0], max_tokens=spec[1], image=spec[2]))
        elif action == "step":
            run_step(scheduler, runtime, generated)
        elif action == "abort" and made:
            number = data.draw(st.sampled_from(sorted(made)))
            scheduler.abort(number)
            disturbed.add(number)
        elif action == "fail":
            plan = scheduler.schedule()
            if plan is not None:
                disturbed |= set(scheduler.fail_step(plan))
        scheduler.check()
    while run_step(scheduler, runtime, generated):
        pass
    assert scheduler.num_free_pages == LIMITS.num_pages
    for number, (text, max_tokens, image) in made.items():
        if number not in disturbed:
            expected = alone(sequence(number, text=text, max_tokens=max_tokens, image=image))
            assert generated[number] == expected


def test_an_illegal_move_names_both_phases():
    item = sequence(1)
    with pytest.raises(AssertionError, match="waiting to decode"):
        item.move(Phase.DECODE)


def test_importing_the_scheduler_loads_neither_torch_nor_numpy_nor_asyncio_users():
    code = "import sys, kestrel_engine.scheduler.scheduler; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
