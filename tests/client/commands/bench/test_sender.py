"""What a stage measures: which requests, from which instant, within which bounds. The server is a few lines here."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from kestrel_client import KestrelError, TextDelta
from kestrel_client.commands.bench import sample_images
from kestrel_client.commands.bench.mix import Mix
from kestrel_client.commands.bench.sample_images import make_images, new_image
from kestrel_client.commands.bench.sender import PER_CONNECTION, UNFINISHED, Plan, Stage, run_stage
from kestrel_client.commands.bench.tally import Slo
from kestrel_client.commands.parser import CommandError
from tests.waiting import until

RESULT = SimpleNamespace(
    usage=SimpleNamespace(input_tokens=10, output_tokens=3, cached_tokens=5),
    timings=SimpleNamespace(decode_ms=2.0, processing_ms=3.0, queue_ms=1.0),
)
pytestmark = pytest.mark.usefixtures("still_clock")
MIX = Mix({"query": 1.0}, ["what?"], ["cat"])


class Server:
    """Answers with two events, the first of them after ``first_s``. ``work`` is awaited between them, with the number
    of the call."""

    def __init__(self, work=None, first_s=0.0):
        self.work, self.first_s, self.calls, self.images = work, first_s, 0, []

    def stream_query(self, image, words, **options):
        self.calls += 1
        self.images.append(image)
        return Answer(self, self.calls)


class Answer:
    def __init__(self, server, number):
        self.server, self.number = server, number

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def __aiter__(self):
        await asyncio.sleep(self.server.first_s)
        yield TextDelta("a", 1)
        if self.server.work is not None:
            await self.server.work(self.number)
        yield TextDelta("b c", 3)

    async def result(self):
        return RESULT


async def measure(server, loop, level, *, clients=1, window=0.4, **given):
    """``given``: fields of the plan or of the stage."""
    about = {k: given.pop(k) for k in ("images", "unique_share", "slo") if k in given}
    plan = Plan(**{"mix": MIX, "images": [b"image"]} | about)
    stage = Stage(loop, level, window, **{"drain_s": 60.0, "most_in_flight": 1000} | given)
    return await run_stage([server] * clients if clients == 1 else clients, plan, stage)


async def test_a_closed_loop_keeps_its_requests_in_flight():
    running = most = 0

    async def work(_):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.02)
        running -= 1

    server = Server(work)
    tally, health = await measure(server, "closed", 5)
    assert most == 5 and tally.succeeded == tally.total == server.calls >= 5
    assert tally.latency.percentile(1) >= 0.02 > tally.ttft.percentile(1)
    assert tally.itl.count == 2 * tally.total  # the two tokens that came together share the gap
    assert tally.itl.percentile(1) >= 0.01
    assert tally.output_tokens == 3 * tally.ended and tally.by_skill["query"].count == tally.total
    assert health.cpu_share >= 0 and health.lag.count > 0


async def test_an_open_loop_measures_from_when_requests_were_due(still_clock):
    """The client stands still for 0.3 s. What was due meanwhile waited, and says so (no coordinated omission)."""

    async def work(number):
        if number == 5:
            still_clock.advance(0.3)

    tally, health = await measure(Server(work), "open", 100, window=0.6)
    assert 40 < tally.total == tally.succeeded < 80
    assert tally.latency.longest_s >= 0.25
    # Some thirty requests were due meanwhile. A measure from the sending would show one slow request.
    assert tally.latency.percentile(80) >= 0.1 and tally.ttft.percentile(80) >= 0.1
    assert tally.lateness.percentile(80) >= 0.1 and health.lag.longest_s >= 0.2
    assert health.limits(tally.lateness, 0.01)


async def test_a_slow_server_does_not_slow_an_open_loop():
    ready = asyncio.Event()

    async def work(number):
        if number == 20:
            ready.set()
        await ready.wait()

    server = Server(work)
    tally, _ = await measure(server, "open", 100, most_in_flight=30)
    assert server.calls >= 20 and tally.succeeded >= 20
    assert tally.latency.longest_s >= 0.1  # the first waited for the twentieth


async def test_an_open_loop_is_bounded_and_what_is_not_sent_has_failed():
    never = asyncio.Event()
    server = Server(lambda _: never.wait())
    tally, _ = await measure(server, "open", 200, most_in_flight=10, drain_s=0.05)
    assert server.calls == 10 and tally.succeeded == 0 and tally.failed == tally.total >= 60
    assert set(tally.errors) == {UNFINISHED, "not sent: 10 were in flight"}
    assert tally.errors[UNFINISHED] == 10


async def test_the_warm_up_is_not_measured():
    server = Server(lambda _: asyncio.sleep(0.01))
    tally, _ = await measure(server, "open", 100, warm_up_s=0.3, window=0.2)
    assert 0 < tally.total < server.calls


async def test_requests_of_a_closed_loop_that_outlast_the_window_are_measured():
    server = Server(lambda _: asyncio.sleep(0.5))
    tally, _ = await measure(server, "closed", 3, warm_up_s=0.05, window=0.1)
    assert tally.total == tally.latency.count == 3 and tally.ended == 0
    assert tally.latency.percentile(1) >= 0.5


async def test_errors_are_counted_and_end_no_caller():
    async def work(number):
        if number % 2:
            raise KestrelError(f"odd\nsecond line {number}")

    tally, _ = await measure(Server(work), "closed", 2)
    assert tally.errors == {"odd": tally.failed} and 0 < tally.failed < tally.total


async def test_goodput_counts_requests_within_the_objective():
    server = Server(lambda number: asyncio.sleep(0.4 if number % 2 else 0))
    tally, _ = await measure(server, "open", 50, slo=Slo(itl_s=0.15), window=0.5)
    assert 0 < tally.good < tally.succeeded and 0 < tally.ended_good <= tally.ended
    tally, _ = await measure(Server(first_s=0.02), "open", 50, slo=Slo(ttft_s=0.01), window=0.1)
    assert tally.good == 0 < tally.succeeded


async def test_new_images_are_new_and_their_share_is_kept():
    (image,) = make_images(1, 64, 48, seed=3)
    assert make_images(1, 64, 48, seed=3) == [image] != make_images(1, 64, 48, seed=4)
    server = Server(lambda _: asyncio.sleep(0.002))
    await measure(server, "closed", 2, images=[image], unique_share=0.5)
    new = [each for each in server.images if each != image]
    assert len(set(new)) == len(new) and 0 < len(new) < server.calls


async def test_an_image_that_cannot_be_read_ends_the_run_with_its_reason():
    for loop in ("closed", "open"):
        with pytest.raises(CommandError, match="cannot make a new image from one of the images"):
            await measure(Server(), loop, 2, images=[b"no image"], unique_share=1.0, window=1e6)


async def test_an_interrupt_ends_a_stage_at_once():
    server = Server(lambda _: asyncio.Event().wait())
    running = asyncio.create_task(measure(server, "closed", 2, window=1e6, drain_s=1e6))
    await until(lambda: server.calls >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_images_are_bounded(tmp_path, monkeypatch):
    path = tmp_path / "a.jpg"
    path.write_bytes(bytes(100))
    assert sample_images.open_images([str(path)]) == [bytes(100)]
    monkeypatch.setattr(sample_images, "_MOST_BYTES", 150)
    with pytest.raises(CommandError, match=r"a.jpg: the images of a run together may have"):
        sample_images.open_images([str(path), str(path)])
    with pytest.raises(CommandError, match=r"made-up image 1 of 3: .* may have"):
        make_images(3, 64, 48, seed=0)


def test_a_new_image_keeps_its_size_and_nearly_its_look():
    import pyvips

    for width, height in ((16, 16), (37, 90), (200, 17)):
        (image,) = make_images(1, width, height, seed=1)
        before, after = (
            pyvips.Image.new_from_buffer(i, "") for i in (image, new_image(image, random.Random(1)))
        )
        assert (after.width, after.height) == (width, height)
        assert (before - after).abs().avg() < 8


async def test_calls_use_one_connection_until_it_is_full():
    first, second = (Server(lambda _: asyncio.sleep(1)) for _ in range(2))
    await measure(None, "closed", PER_CONNECTION, clients=[first, second], window=0.5)
    assert (first.calls, second.calls) == (PER_CONNECTION, 0)
    await measure(None, "closed", PER_CONNECTION + 3, clients=[first, second], window=0.5)
    assert (first.calls, second.calls) == (2 * PER_CONNECTION, 3)
