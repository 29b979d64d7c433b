"""Gaze: of eyes, of faces, and of every face; once or accurately; alone, in Analyze and on frames."""

import asyncio
from itertools import pairwise
from typing import Any

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.requests import Coord, Size
from kestrel_grpc.services.answers.several import MAX_SEQUENCES
from tests.fake_runtime import FakeRuntime, hashed
from tests.service.conftest import LIMITS, HeldRuntime, Serve, raw_image
from tests.service.services.test_skills import without_timings
from tests.service.statuses import failure
from tests.waiting import until

STOP, CANCELLED = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_CANCELLED
EYES = [common_pb2.Point(x=x / 8, y=0.25) for x in range(4)]
FACE = common_pb2.Box(x_min=0.25, y_min=0.25, x_max=0.5, y_max=0.75)
SEEDED = common_pb2.Sampling(seed=7)


def some_leave(fed: Any) -> int:
    """Half of the gazes leave the image. Objects are found as usual."""
    is_gaze = any(isinstance(a, Coord) and isinstance(b, Coord) for a, b in pairwise(fed))
    return 9 * (hashed(fed) // 7 % 2) if is_gaze else hashed(fed, LIMITS.vocab_size)


def request(**fields: Any) -> pb.GazeRequest:
    return pb.GazeRequest(image=raw_image(), gaze=pb.GazeTask(**fields))


TASKS = {
    "an eye": {"eyes": EYES[:1]},
    "eyes": {"eyes": EYES},
    "faces": {"faces": [FACE, FACE]},
    "every face": {"max_faces": 3},
    "accurate faces": {"faces": [FACE, FACE], "accurate": True},
    "every face accurately": {"max_faces": 2, "accurate": True},
}


@pytest.mark.parametrize("name", TASKS)
async def test_a_stream_tells_what_one_answer_tells(serve: Serve, name: str) -> None:
    served = await serve(FakeRuntime(LIMITS, some_leave))
    asked = request(**TASKS[name], sampling=SEEDED)
    response = await served.vision.Gaze(asked)
    assert response.gazes and response.info.model == "fake" and response.info.request_id
    assert response.usage.image_tokens % 81 == 0 and response.usage.image_tokens > 0
    for each in response.gazes:
        assert each.finish_reason == STOP and 0 <= each.absence <= 1
        assert each.HasField("face") == ("eye" not in name)
        assert each.HasField("target") or each.score == 0
    events = [event async for event in served.vision.StreamGaze(asked)]
    assert [event.sequence for event in events] == list(range(len(events)))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds[-1] == "final"
    assert without_timings(events[-1].final) == without_timings(response)
    told = [event.gaze for event in events if event.HasField("gaze")]
    assert sorted(map(str, told)) == sorted(map(str, response.gazes))
    faces = [event.detection.box for event in events if event.HasField("detection")]
    if "every" in name:
        assert kinds.count("search") == 1 and response.search.object == "face"
        assert faces == [each.face for each in response.gazes]
    else:
        assert set(kinds) == {"started", "gaze", "final"} and not response.HasField("search")


async def test_each_eye_gives_what_it_gives_alone(serve: Serve) -> None:
    served = await serve(FakeRuntime(LIMITS, some_leave))
    together = await served.vision.Gaze(request(eyes=EYES))
    alone = [await served.vision.Gaze(request(eyes=[eye])) for eye in EYES]
    assert list(together.gazes) == [response.gazes[0] for response in alone]
    assert [each.eye for each in together.gazes] == EYES
    assert len({each.HasField("target") for each in together.gazes}) == 2
    assert together.usage.output_tokens == sum(each.usage.output_tokens for each in alone)


async def test_every_face_is_what_detect_and_gaze_give(serve: Serve) -> None:
    served = await serve(FakeRuntime(LIMITS, some_leave))
    found = await served.vision.Detect(
        pb.DetectRequest(image=raw_image(), detect=pb.DetectTask(objects=["face"], max_objects=3))
    )
    every = await served.vision.Gaze(request(max_faces=3))
    assert [each.face for each in every.gazes] == [each.box for each in found.detections]
    assert every.search == found.searches[0]
    eyes = [each.eye for each in every.gazes]
    alone = await served.vision.Gaze(request(eyes=eyes))
    assert [(each.target, each.absence) for each in every.gazes] == [
        (each.target, each.absence) for each in alone.gazes
    ]
    every = await served.vision.Gaze(request(max_faces=3, accurate=True, sampling=SEEDED))
    faces = [each.face for each in every.gazes]
    given = await served.vision.Gaze(request(faces=faces, accurate=True, sampling=SEEDED))
    assert [each.target for each in given.gazes] == [each.target for each in every.gazes]


async def test_an_image_without_faces_has_no_gazes(serve: Serve) -> None:
    served = await serve(FakeRuntime(LIMITS, lambda fed: 0))
    for accurate in (False, True):
        response = await served.vision.Gaze(request(accurate=accurate))
        assert not response.gazes and response.search.finish_reason == STOP
        assert response.usage.output_tokens == 0 and response.info.images[0].image_id


async def test_an_accurate_gaze_follows_its_seed(serve: Serve) -> None:
    served = await serve()
    asked = request(faces=[FACE], accurate=True, sampling=SEEDED)
    first, again = [await served.vision.Gaze(asked) for _ in range(2)]
    assert first.gazes == again.gazes and first.info.seed == 7
    assert first.usage.image_tokens == 20 * 81
    unseeded = await served.vision.Gaze(request(faces=[FACE], accurate=True))
    asked.gaze.sampling.seed = unseeded.info.seed
    assert (await served.vision.Gaze(asked)).gazes == unseeded.gazes != first.gazes


async def test_the_mirrored_image_is_another_image(serve: Serve) -> None:
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime)
    await served.vision.Gaze(request(faces=[FACE, FACE], accurate=True))
    keys = {piece.image.key for plan in runtime.plans for piece in plan.encode}
    assert len(keys) == 2
    assert served.engine.num_requests == 0


async def test_the_task_may_be_left_out(serve: Serve) -> None:
    served = await serve()
    response = await served.vision.Gaze(pb.GazeRequest(image=raw_image()))
    assert response.search.object == "face"


async def test_gazes_in_analyze_and_on_frames(serve: Serve) -> None:
    served = await serve()
    tasks = [
        pb.Task(key="all", gaze=pb.GazeTask(max_faces=2)),
        pb.Task(key="mine", gaze=pb.GazeTask(faces=[FACE], accurate=True, sampling=SEEDED)),
        pb.Task(key="bad", gaze=pb.GazeTask(eyes=[common_pb2.Point(x=2)])),
    ]
    alone = await served.vision.Gaze(request(max_faces=2))
    asked = pb.AnalyzeRequest(image=raw_image(), tasks=tasks)
    every, mine, bad = (await served.vision.Analyze(asked)).results
    assert every.gaze.gazes == alone.gazes and every.gaze.search == alone.search
    assert len(mine.gaze.gazes) == 1 and mine.gaze.info.seed == 7
    assert "tasks[2].gaze.eyes[0]: 2.0 is not a number in [0, 1]" in bad.error.message
    events = [event async for event in served.vision.StreamAnalyze(asked)]
    assert [e.gaze for e in events if e.HasField("gaze") and e.key == "mine"] == mine.gaze.gazes
    config = pb.FramesConfig(tasks=tasks[:2])
    frame = pb.Frame(frame_id=1, image=raw_image())
    sent = [pb.StreamFramesRequest(config=config), pb.StreamFramesRequest(frame=frame)]
    (told,) = [response async for response in served.vision.StreamFrames(sent)]
    first, second = told.results.results
    assert (first.gaze.gazes, second.gaze.gazes) == (alone.gazes, mine.gaze.gazes)


async def test_a_region_has_coordinates_of_the_whole_image(serve: Serve) -> None:
    served = await serve()
    image = raw_image()
    image.region.CopyFrom(common_pb2.Box(x_min=0.2, y_min=0.2, x_max=0.8, y_max=0.8))
    gaze = pb.GazeTask(faces=[FACE], accurate=True)
    (found,) = (await served.vision.Gaze(pb.GazeRequest(image=image, gaze=gaze))).gazes
    assert 0.2 <= found.target.x <= 0.8 and 0.2 <= found.target.y <= 0.8
    for outside, field in (
        ({"eyes": [common_pb2.Point(x=0.5, y=0.5), common_pb2.Point(x=0.1, y=0.5)]}, "eyes[1]"),
        ({"faces": [common_pb2.Box(x_max=0.1, y_max=0.1)]}, "faces[0]"),
        ({"faces": [common_pb2.Box(x_max=0.1, y_max=0.1)], "accurate": True}, "faces[0]"),
    ):
        asked = pb.GazeRequest(image=image, gaze=pb.GazeTask(**outside))
        told = await failure(served.vision.Gaze(asked))
        assert told.fields == [f"gaze.{field}"] and "is outside image.region" in told.message


async def test_bad_input_names_its_field(serve: Serve) -> None:
    served = await serve()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"eyes": [common_pb2.Point(x=1.5)]}, "eyes[0]", "1.5 is not a number in [0, 1]"),
        ({"eyes": [*EYES, common_pb2.Point(y=-1)]}, "eyes[4]", "-1.0 is not"),
        ({"eyes": [common_pb2.Point(x=float("nan"))]}, "eyes[0]", "nan is not"),
        ({"faces": [common_pb2.Box(x_max=float("inf"))]}, "faces[0].x_max", "inf is not"),
        ({"faces": [FACE, common_pb2.Box(x_min=0.5)]}, "faces[1]", "x_min <= x_max"),
        ({"eyes": EYES, "faces": [FACE]}, "faces", "beside an eye; set only one"),
        ({"eyes": EYES, "accurate": True}, "accurate", "give the face instead of an eye"),
        ({"eyes": EYES, "max_faces": 2}, "max_faces", "leave out"),
        ({"max_faces": 0}, "max_faces", "must be 1 to 256"),
        ({"max_faces": 257}, "max_faces", "257"),
        ({"eyes": EYES * 65}, "eyes", "260 places, the limit is 256"),
        ({"faces": [FACE] * 257}, "faces", "257 places"),
        ({"eyes": EYES[:1], "max_tokens": -1}, "max_tokens", "-1"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature", "-1"),
    ]
    for fields, field, words in cases:
        for call in (served.vision.StreamGaze, served.vision.Gaze):
            told = await failure(call(request(**fields)))
            assert told.code is grpc.StatusCode.INVALID_ARGUMENT
            assert told.fields == [f"gaze.{field}"] and words in told.message


async def test_looks_begin_when_their_turn_comes(serve: Serve) -> None:
    """A request of 16 KiB may ask for 163,840 looks. Those that wait for a turn hold nothing."""
    served = await serve(HeldRuntime())
    faces = [common_pb2.Box()] * 256
    tasks = [pb.Task(gaze=pb.GazeTask(faces=faces, accurate=True)) for _ in range(32)]
    call = served.vision.Analyze(pb.AnalyzeRequest(image=raw_image(), tasks=tasks))
    await until(lambda: served.engine.num_requests == MAX_SEQUENCES)
    assert MAX_SEQUENCES < len(asyncio.all_tasks()) < 32 * 100
    call.cancel()
    served.runtime.gate.set()
    await until(lambda: served.engine.num_requests == 0)


async def test_the_order_of_looks_does_not_matter(serve: Serve) -> None:
    """More faces than are looked at together: each has the gaze that it has in a shorter list."""
    served = await serve()
    asked = {"accurate": True, "sampling": SEEDED}
    many = await served.vision.Gaze(request(faces=[FACE] * 7, **asked))
    few = await served.vision.Gaze(request(faces=[FACE] * 2, **asked))
    assert many.gazes[:2] == few.gazes
    assert many.usage.image_tokens == 7 * 20 * 81 == 7 * few.usage.image_tokens // 2
    assert many.usage.output_tokens > few.usage.output_tokens


async def test_the_engines_skill_by_its_name(serve: Serve) -> None:
    served = await serve(family="moondream2")
    skill = pb.SkillTask(name="gaze", arguments={"eye": [0.25, 0.5]})
    named = await served.vision.RunSkill(pb.RunSkillRequest(image=raw_image(), skill=skill))
    eye = common_pb2.Point(x=0.25, y=0.5)
    (own,) = (await served.vision.Gaze(request(eyes=[eye]))).gazes
    target = named.output["gaze"]
    assert (target["x"], target["y"]) == pytest.approx((own.target.x, own.target.y))
    assert named.finish_reason == own.finish_reason == STOP
    skill.arguments["eye"] = [0.25, 2]
    told = await failure(served.vision.RunSkill(pb.RunSkillRequest(image=raw_image(), skill=skill)))
    assert told.fields == ["skill.arguments.eye"] and "2 is not" in told.message


def looks_of(**fields: Any) -> Any:
    """A request of many gazes, which the test names "mine"."""
    options = common_pb2.RequestOptions(request_id="mine")
    return pb.GazeRequest(image=raw_image(), gaze=pb.GazeTask(**fields), options=options)


async def test_a_cancel_ends_the_looks_that_have_not_begun(serve: Serve) -> None:
    served = await serve(HeldRuntime())
    mine = served.vision.Gaze(looks_of(faces=[FACE] * 7, accurate=True))
    await until(lambda: served.engine.num_requests == MAX_SEQUENCES)
    sibling = served.vision.Gaze(request(eyes=EYES))
    await until(lambda: served.engine.num_requests == MAX_SEQUENCES + len(EYES))
    assert served.engine.cancel("mine") == MAX_SEQUENCES
    served.runtime.gate.set()
    response = await mine
    assert [each.finish_reason for each in response.gazes] == [CANCELLED] * 7
    assert not any(each.HasField("target") for each in response.gazes)
    assert all(each.finish_reason == STOP for each in (await sibling).gazes)
    assert response.usage.output_tokens <= MAX_SEQUENCES
    await until(lambda: served.engine.num_requests == 0)
    assert served.engine.stats.pages_held == 0


async def test_a_cancel_of_the_search_for_faces_ends_the_gazes(serve: Serve) -> None:
    found = asyncio.Event()

    def script(fed: Any) -> int:
        if any(isinstance(token, Size) for token in fed) and not found.is_set():
            found.set()
            served.runtime.gate.clear()
        return some_leave(fed)

    served = await serve(HeldRuntime(LIMITS, script))
    served.runtime.gate.set()
    mine = served.vision.Gaze(looks_of(max_faces=3))
    await until(found.is_set)
    # The search, or the gazes if it has ended meanwhile.
    await until(lambda: served.engine.cancel("mine"))
    served.runtime.gate.set()
    response = await mine
    assert response.gazes
    assert [each.finish_reason for each in response.gazes] == [CANCELLED] * len(response.gazes)


async def test_a_deadline_ends_every_look(serve: Serve) -> None:
    served = await serve(HeldRuntime())
    late = served.vision.Gaze(looks_of(faces=[FACE] * 7, accurate=True), timeout=0.5)
    sibling = served.vision.Gaze(request(eyes=EYES))
    assert (await failure(late)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    served.runtime.gate.set()
    assert all(each.finish_reason == STOP for each in (await sibling).gazes)
    await until(lambda: served.engine.num_requests == 0)
    begun = sum(len(plan.prefill) for plan in served.runtime.plans)
    assert begun <= MAX_SEQUENCES + len(EYES)
    assert served.engine.stats.pages_held == 0
