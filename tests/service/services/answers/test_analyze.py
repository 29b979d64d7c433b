"""Analyze over a real socket: tasks share an image, fail alone, mix their events, and end together on cancellation."""

import asyncio
import logging

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, NO_END, EndlessRuntime, HeldRuntime, raw_image
from tests.service.statuses import failure, of_message
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY = {"max_tokens": 6, "sampling": common_pb2.Sampling(temperature=0)}
TASKS = {
    "query": {"query": pb.QueryTask(question="what?", **GREEDY)},
    "caption": {"caption": pb.CaptionTask(**GREEDY)},
    "point": {"point": pb.PointTask(objects=["cat"], max_objects=2)},
    "detect": {"detect": pb.DetectTask(objects=["cat"], max_objects=2)},
    "segment": {
        "segment": pb.SegmentTask(objects=["cat"], **GREEDY, mask_format=pb.MASK_FORMAT_RLE)
    },
}


def request(*tasks, image=None, **options):
    return pb.AnalyzeRequest(
        image=image or raw_image(), tasks=tasks, options=common_pb2.RequestOptions(**options)
    )


def all_tasks():
    return [pb.Task(key=f"my {name}".replace(" ", "-"), **TASKS[name]) for name in TASKS]


def question(text="what?", key=None, max_tokens=2, stop=(), **sampling):
    return pb.Task(
        key=key,
        query=pb.QueryTask(
            question=text,
            max_tokens=max_tokens,
            sampling=common_pb2.Sampling(**{"temperature": 0} | sampling),
            text=common_pb2.TextOptions(stop=stop),
        ),
    )


def stream(served, analyze_request):
    return served.vision.StreamAnalyze(analyze_request)


def plain(response):
    """Without what differs from one run to the next."""
    copy = type(response)()
    copy.CopyFrom(response)
    copy.ClearField("timings")
    copy.info.request_id, copy.info.seed = "", 0
    copy.usage.cached_tokens = 0
    for answer in (*getattr(copy, "answers", ()), *getattr(copy, "captions", ())):
        answer.seed = 0
    return copy


async def test_every_task_gives_what_its_method_gives(serve):
    served = await serve()
    reply = await served.vision.Analyze(request(*all_tasks(), request_id="mine"))
    assert [result.key for result in reply.results] == [f"my-{name}" for name in TASKS]
    for result, (name, task) in zip(reply.results, TASKS.items(), strict=True):
        assert result.WhichOneof("outcome") == name
        method, image = name.title(), raw_image()
        shown = {"images": [image]} if name == "query" else {"image": image}
        alone = getattr(pb, f"{method}Request")(**shown, **task)
        outcome = getattr(result, name)
        assert plain(outcome) == plain(await getattr(served.vision, method)(alone))
        assert outcome.info.request_id == reply.info.request_id == "mine"
        assert outcome.info.images == reply.info.images and outcome.info.seed
    usages = [getattr(r, r.WhichOneof("outcome")).usage for r in reply.results]
    for field in ("input_tokens", "output_tokens", "cached_tokens", "image_tokens"):
        assert getattr(reply.usage, field) == sum(getattr(u, field) for u in usages)
    assert reply.info.model == "fake" and not reply.info.seed
    (seen,) = reply.info.images
    assert (seen.size.width, seen.size.height) == (60, 40) and seen.image_id
    assert reply.timings.total_ms >= reply.timings.ttft_ms > 0


async def test_the_image_is_encoded_once_and_its_prefix_shared(serve):
    served = await serve()
    reply = await served.vision.Analyze(request(*(question(f"{n}?") for n in range(8))))
    encoded = sum(piece.last - piece.first for p in served.runtime.plans for piece in p.encode)
    alone = await serve()
    await alone.vision.Query(
        pb.QueryRequest(images=[raw_image()], query=pb.QueryTask(question="0?", **GREEDY))
    )
    assert encoded == sum(
        piece.last - piece.first for p in alone.runtime.plans for piece in p.encode
    )
    assert [result.key for result in reply.results] == [str(n) for n in range(8)]
    assert reply.usage.cached_tokens >= 7 * 80


async def test_a_stream_tells_every_task_and_then_all(serve):
    served = await serve()
    events = [event async for event in stream(served, request(*all_tasks()))]
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "final"
    assert kinds.count("started") == kinds.count("final") == 1
    assert events[0].key == events[-1].key == ""
    final = events[-1].final
    assert events[0].started == final.info and final.info.images[0].image_id
    by_key = {}
    for event in events[1:-1]:
        by_key.setdefault(event.key, []).append(event)
    assert list(by_key) and set(by_key) == {result.key for result in final.results}
    for result in final.results:
        *updates, last = by_key[result.key]
        assert last.task_final == result
        kinds = {event.WhichOneof("event") for event in updates}
        if result.HasField("query") or result.HasField("caption"):
            (answer,) = result.query.answers or result.caption.captions
            assert "".join(event.text_delta.text for event in updates) == answer.text
            continue
        *updates, ended = updates
        response = getattr(result, result.WhichOneof("outcome"))
        assert [ended.search] == list(response.searches)
        if result.HasField("segment"):
            assert kinds <= {"detection", "path_piece", "search"}
        else:
            assert [event.detection for event in updates] == list(response.detections)


async def test_events_of_tasks_mix(serve):
    # Slow enough that each token is told by itself.
    served = await serve(FakeRuntime(LIMITS, lambda fed: 197, cost=lambda plan: 0.02))
    tasks = [question(key=key, max_tokens=20) for key in "ab"]
    events = [e async for e in stream(served, request(*tasks)) if e.HasField("text_delta")]
    keys = "".join(event.key for event in events)
    assert "aba" in keys and "bab" in keys


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_task_that_fails_leaves_the_others_alone(serve, streaming):
    served = await serve(family="moondream2")
    tasks = [
        question(key="good"),
        question("", key="empty"),
        question(key="hot", top_p=1.5),
        pb.Task(
            key="ref", point=pb.PointTask(objects=["cat"], spatial_refs=[common_pb2.SpatialRef()])
        ),
        pb.Task(key="length", caption=pb.CaptionTask(length=9)),
        pb.Task(key="cannot", segment=pb.SegmentTask(objects=["cat"])),
        pb.Task(key="long", detect=pb.DetectTask(objects=["x" * 400])),
    ]
    if streaming:
        events = [event async for event in stream(served, request(*tasks))]
        reply = events[-1].final
        assert {e.key: e.task_final for e in events if e.HasField("task_final")} == {
            result.key: result for result in reply.results
        }
    else:
        reply = await served.vision.Analyze(request(*tasks))
    results = {result.key: result for result in reply.results}
    assert results["good"].query.usage.output_tokens == 2
    wanted = {
        "empty": (INVALID, "INVALID_REQUEST", "tasks[1].query.question"),
        "hot": (INVALID, "INVALID_REQUEST", "tasks[2].query.sampling.top_p"),
        "ref": (INVALID, "INVALID_REQUEST", "tasks[3].point.spatial_refs[0]"),
        "length": (INVALID, "INVALID_REQUEST", "tasks[4].caption.length"),
        "cannot": (grpc.StatusCode.FAILED_PRECONDITION, "SKILL_UNAVAILABLE", "options.model"),
        "long": (INVALID, "CONTEXT_LENGTH_EXCEEDED", "tasks[6].detect.objects[0]"),
    }
    for key, (code, reason, field) in wanted.items():
        told = of_message(results[key].error)
        assert (told.code, told.reason, told.fields) == (code, reason, [field])
        assert told.message.startswith(f"{field}: ") and told.request_id == reply.info.request_id


async def test_the_error_of_a_task_says_when_to_try_again(serve):
    """It has the details that the status of a call has."""
    served = await serve(HeldRuntime(), max_queue=1)
    asked = request(*(question(key=f"{n}") for n in range(5)))
    asking = asyncio.ensure_future(served.vision.Analyze(asked))
    await until(lambda: served.engine.num_requests == 4)
    served.runtime.gate.set()
    reply = await asking
    (told,) = [of_message(each.error) for each in reply.results if each.HasField("error")]
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert told.retry_after_s is not None and told.retry_after_s > 0


async def test_a_task_may_be_a_named_skill(serve):
    served = await serve()

    def named(**fields):
        return pb.Task(skill=pb.SkillTask(**fields))

    tasks = [
        named(name="detect", arguments={"object": "cat"}, settings={"max_objects": 2}),
        named(name="query", arguments={"question": "what?"}, **GREEDY),
        named(name="sing"),
        named(name="detect", arguments={"object": " "}),
        named(name="detect", arguments={"object": "cat"}, settings={"max_objects": 0}),
        named(name="query"),
        named(name="query", arguments={"question": "?"}, sampling={"top_p": 2}),
    ]
    found, answered, *failed = (await served.vision.Analyze(request(*tasks))).results
    alone = pb.RunSkillRequest(image=raw_image(), skill=tasks[0].skill)
    assert plain(found.skill) == plain(await served.vision.RunSkill(alone))
    text = await served.vision.Query(
        pb.QueryRequest(images=[raw_image()], query=TASKS["query"]["query"])
    )
    assert answered.skill.output["answer"] == text.answers[0].text
    told = [of_message(each.error) for each in failed]
    assert [(each.reason, each.fields) for each in told] == [
        ("SKILL_NOT_FOUND", ["tasks[2].skill.name"]),
        ("INVALID_REQUEST", ["tasks[3].skill.arguments.object"]),
        ("INVALID_REQUEST", ["tasks[4].skill.settings.max_objects"]),
        ("INVALID_REQUEST", ["tasks[5].skill.arguments.question"]),
        ("INVALID_REQUEST", ["tasks[6].skill.sampling.top_p"]),
    ]
    events = [event async for event in stream(served, request(*tasks[:2]))]
    labels = {event.detection.label for event in events if event.HasField("detection")}
    assert labels == {"cat"}


async def test_our_own_failure_in_a_task_is_told_without_its_words(serve, caplog):
    served = await serve()
    start = served.engine.start

    async def break_down(request):
        if request.skill == "caption":
            raise LookupError("secret")
        return await start(request)

    served.engine.start = break_down
    tasks = [question(), pb.Task(caption=pb.CaptionTask())]
    reply = await served.vision.Analyze(request(*tasks, request_id="r-1"))
    assert reply.results[0].query.usage.output_tokens
    assert reply.results[1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "secret" not in repr(reply) and "r-1" in reply.results[1].error.message
    (record,) = [r for r in caplog.records if "r-1" in r.getMessage()]
    assert record.exc_info[0] is LookupError


NO_IMAGE = request(question())
NO_IMAGE.ClearField("image")
BAD = {
    "no tasks": (request(), "tasks", "INVALID_REQUEST"),
    "too many": (request(*[question()] * 33), "tasks", "INVALID_REQUEST"),
    "a task of nothing": (request(question(), pb.Task()), "tasks[1]", "INVALID_REQUEST"),
    "an empty key": (request(question(key="")), "tasks[0].key", "INVALID_REQUEST"),
    "a key twice": (request(question(), question(key="0")), "tasks[1].key", "INVALID_REQUEST"),
    "no picture": (NO_IMAGE, "image", "INVALID_REQUEST"),
    "no such picture": (
        request(question(), image=common_pb2.Image(image_id="img_0")),
        "image.image_id",
        "IMAGE_NOT_FOUND",
    ),
    "an empty id": (request(question(), image=common_pb2.Image(image_id="")), "image.image_id", "INVALID_REQUEST"),
    "a broken picture": (request(question(), image=common_pb2.Image(encoded=b"\xff\xd8\xff")), "image", "IMAGE_BROKEN"),
    "no such model": (request(question(), model="other"), "options.model", "MODEL_NOT_FOUND"),
    "no such priority": (request(question(), priority=9), "options.priority", "INVALID_REQUEST"),
    "a bad id": (request(question(), request_id=""), "options.request_id", "INVALID_REQUEST"),
}  # fmt: skip


async def test_what_is_wrong_with_the_call_fails_it(serve):
    served = await serve()
    for case, (bad, field, reason) in BAD.items():
        for call in (served.vision.Analyze(bad), stream(served, bad)):
            told = await failure(call)
            assert (told.fields, told.reason) == ([field], reason), case
    assert served.engine.num_requests == 0


@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_giving_up_frees_everything(serve, caplog, streaming, end):
    """Of six tasks three run and three wait, the batch being full."""
    served = await serve(EndlessRuntime())
    tasks = request(*(question(key=f"{n}", max_tokens=NO_END) for n in range(6)))

    def ask(timeout=None):
        if streaming:
            return served.vision.StreamAnalyze(tasks, timeout=timeout)
        return served.vision.Analyze(tasks, timeout=timeout)

    if end == "cancel":
        call = ask()
        await until(lambda: served.engine.num_requests == 6)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            if streaming:
                while await call.read():
                    pass
            await call
    else:
        assert (await served.overdue(ask)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    served.runtime.ends.set()
    await until(lambda: served.engine.num_requests == 0)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    reply = await served.vision.Analyze(request(*(question(f"{n}?") for n in range(6))))
    assert len(reply.results) == 6


async def test_the_access_log_has_one_line_for_all(serve, caplog):
    caplog.set_level(logging.INFO, "kestrel_grpc.access")
    served = await serve(server_config={"access_log": "text"})
    reply = await served.vision.Analyze(request(question("a?"), question("b?")))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kestrel_grpc.access"]
    told = dict(part.split("=", 1) for part in line.split())
    assert told["method"] == "kestrel.v1.VisionService/Analyze"
    assert int(told["output_tokens"]) == reply.usage.output_tokens == 4
