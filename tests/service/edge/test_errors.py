"""Every bad input and every failure gets a precise status that names the field and shows nothing internal."""

import asyncio
import math
import threading

import grpc
import pytest
import pyvips
from google.rpc import error_details_pb2, status_pb2

import kestrel_engine.errors
from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.edge.failures import statuses as errors
from kestrel_grpc.edge.failures.statuses import status_of
from kestrel_grpc.security.admission.admission import RateExceeded, TooManyCalls
from kestrel_grpc.security.admission.message_room import MessagesFull
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure
from tests.waiting import until

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def encoded(data):
    return common_pb2.Image(encoded=data)


def png(width, height):
    return encoded(pyvips.Image.black(width, height).pngsave_buffer())


def sampling(**fields):
    return common_pb2.Sampling(**fields)


def options(**fields):
    return common_pb2.RequestOptions(**fields)


IMAGE = raw_image()


def query(images=(IMAGE,), options=None, **task):
    task = pb.QueryTask(**({"question": "what?"} | task))
    return pb.QueryRequest(images=images, query=task, options=options)


def about(skill):
    """Makes requests of a skill about one image: from the image, the options and the fields of the task."""

    def make(image=IMAGE, options=None, **fields):
        if skill != "Caption":
            fields = {"objects": ["cat"]} | fields
        task = getattr(pb, f"{skill}Task")(**fields)
        request = getattr(pb, f"{skill}Request")
        return request(**{"image": image, "options": options, skill.lower(): task})

    return make


caption, point, detect, segment = map(about, ("Caption", "Point", "Detect", "Segment"))


def pixels(**fields):
    return caption(image=common_pb2.Image(raw=common_pb2.RawImage(**fields)))


def ref(**box):
    return common_pb2.SpatialRef(box=common_pb2.Box(**box))


JPEG = pyvips.Image.black(64, 64, bands=3).copy(interpretation="srgb").jpegsave_buffer()


def bad(request, field, words, reason="INVALID_REQUEST"):
    return request, field, words, reason


BAD = {
    "no image": bad(caption(image=None), "image", "required"),
    "an empty image message": bad(caption(image=common_pb2.Image()), "image", "encoded, raw"),
    "zero bytes": bad(caption(image=encoded(b"")), "image", "empty", "IMAGE_BROKEN"),
    "noise": bad(caption(image=encoded(bytes(range(256)))), "image", "JPEG", "IMAGE_FORMAT_UNSUPPORTED"),
    "an SVG": bad(
        caption(image=encoded(b'<svg xmlns="http://www.w3.org/2000/svg"/>')),
        "image",
        "format",
        "IMAGE_FORMAT_UNSUPPORTED",
    ),
    "half a JPEG": bad(caption(image=encoded(JPEG[: len(JPEG) // 2])), "image", "JPEG", "IMAGE_BROKEN"),
    "too many pixels": bad(caption(image=png(400, 300)), "image", "400x300", "IMAGE_TOO_LARGE"),
    "too thin": bad(caption(image=png(300, 10)), "image", "30:1", "IMAGE_TOO_LARGE"),
    "too many bytes": bad(caption(image=encoded(bytes(60_000))), "image", "60000", "IMAGE_TOO_LARGE"),
    "raw pixels too few": bad(pixels(data=b"123", width=2, height=2), "image.raw.data", "has 3 bytes"),
    "raw of negative height": bad(pixels(data=b"123", width=1, height=-1), "image.raw.height", "at least 1"),
    "a negative seed": bad(query(sampling=sampling(seed=-1)), "query.sampling.seed", "-1"),
    "a negative top_k": bad(query(sampling=sampling(top_k=-1)), "query.sampling.top_k", "-1"),
    "a negative max_tokens": bad(query(max_tokens=-5), "query.max_tokens", "-5"),
    "a negative max_objects": bad(detect(max_objects=-5), "detect.max_objects", "-5"),
    "raw without width": bad(pixels(data=b"123", height=2), "image.raw.width", "at least 1"),
    "raw of absurd size": bad(pixels(data=b"1", width=2**31 - 1, height=2**31 - 1), "image.raw.data", "has 1 bytes"),
    "raw of unknown format": bad(pixels(data=b"1", width=1, height=1, format=9), "image.raw.format", "9 is not"),
    "raw too large": bad(
        pixels(data=bytes(400 * 300), width=400, height=300, format=3),
        "image",
        "400x300",
        "IMAGE_TOO_LARGE",
    ),
    "empty question": bad(query(question=""), "query.question", "empty"),
    "blank question": bad(query(question=" \n\t "), "query.question", "empty"),
    "32 KiB of question": bad(query(question="x" * 32768), "query.question", "32768"),
    "a question beyond the context": bad(query(question="x" * 400), "query.question", "300", "CONTEXT_LENGTH_EXCEEDED"),
    "empty object": bad(detect(objects=[""]), "detect.objects[0]", "empty"),
    "unknown length": bad(caption(length=17), "caption.length", "17 is not"),
    "unknown mask format": bad(segment(mask_format=17), "segment.mask_format", "17 is not"),
    "unknown priority": bad(query(options=options(priority=17)), "options.priority", "17 is not"),
    "max_tokens 0": bad(query(max_tokens=0), "query.max_tokens", "at least 1"),
    "max_tokens beyond the context": bad(query(max_tokens=4000), "query.max_tokens", "4000", "CONTEXT_LENGTH_EXCEEDED"),
    "top_p 1.5": bad(query(sampling=sampling(top_p=1.5)), "query.sampling.top_p", "1.5"),
    "top_p 0": bad(query(sampling=sampling(top_p=0)), "query.sampling.top_p", "(0, 1]"),
    "top_p NaN": bad(query(sampling=sampling(top_p=math.nan)), "query.sampling.top_p", "nan"),
    "temperature NaN": bad(query(sampling=sampling(temperature=math.nan)), "query.sampling.temperature", "nan"),
    "temperature infinite": bad(query(sampling=sampling(temperature=math.inf)), "query.sampling.temperature", "inf"),
    "temperature -1": bad(query(sampling=sampling(temperature=-1)), "query.sampling.temperature", "-1"),
    "max_objects 0": bad(detect(max_objects=0), "detect.max_objects", "at least 1"),
    "an empty reference": bad(
        query(spatial_refs=[ref(x_max=1, y_max=1), common_pb2.SpatialRef()]),
        "query.spatial_refs[1]",
        "point or box",
    ),
    "a reference beyond the image": bad(
        point(spatial_refs=[ref(x_max=1.5, y_max=1)]), "point.spatial_refs[0]", "[0, 1]"
    ),
    "a reference of NaN": bad(point(spatial_refs=[ref(x_max=math.nan, y_max=1)]), "point.spatial_refs[0]", "nan"),
    "a box inside out": bad(
        segment(spatial_refs=[ref(x_min=0.5, x_max=0.25, y_max=1)]),
        "segment.spatial_refs[0]",
        "x_min <= x_max",
    ),
    "references without an image": bad(query(images=[], spatial_refs=[ref(x_max=1, y_max=1)]), "images[0]", "required"),
    "an empty request id": bad(query(options=options(request_id="")), "options.request_id", "128"),
    "a request id with a blank": bad(query(options=options(request_id="a b")), "options.request_id", "128"),
    "a long request id": bad(query(options=options(request_id="x" * 129)), "options.request_id", "128"),
    "an empty model name": bad(query(options=options(model="")), "options.model", "512"),
    "a long model name": bad(query(options=options(model="x" * 513)), "options.model", "512"),
}  # fmt: skip


def skill_of(request):
    return type(request).__name__.removesuffix("Request")


async def answers(served):
    """Whether the server still does its work."""
    response = await served.vision.Query(query(max_tokens=2))
    return response.usage.output_tokens == 2


@pytest.fixture
async def strict(serve):
    """A server with small limits on images."""
    limits = kestrel_engine.ImageLimits(max_bytes=50_000, max_pixels=100_000)
    return await serve(image_limits=limits)


async def test_bad_input_gets_invalid_argument_naming_the_field(strict):
    """One server takes all of it, and answers afterwards."""
    for name, (request, field, words, reason) in BAD.items():
        skill = skill_of(request)
        unary = await failure(getattr(strict.vision, skill)(request))
        stream = await failure(getattr(strict.vision, f"Stream{skill}")(request))
        for told in (unary, stream):
            assert told.code is INVALID, name
            assert told.fields == [field], name
            assert told.message.startswith(f"{field}: "), name
            assert words in told.message, name
            assert (told.reason, told.domain) == (reason, "kestrel.internal"), name
            assert "Traceback" not in told.message, name
    assert strict.engine.num_requests == 0
    assert await answers(strict)


async def test_bytes_that_are_no_message_are_refused(serve):
    served = await serve()
    call = served.channel.unary_unary("/kestrel.v1.VisionService/Query")
    told = await failure(call(b"\xff\xff\xff"))
    assert told.code is INVALID
    assert "not a valid message" in told.message
    # Text that is not UTF-8.
    told = await failure(call(b"\x12\x04\x0a\x02\xff\xfe"))
    assert told.code is INVALID


async def test_an_unknown_model_is_not_found(serve):
    served = await serve()
    told = await failure(served.vision.Query(query(options=options(model="gpt"))))
    assert told.code is grpc.StatusCode.NOT_FOUND
    assert told.fields == ["options.model"]
    assert told.reason == "MODEL_NOT_FOUND"
    assert "'gpt'" in told.message
    assert "fake" in told.message, "it says what is served"
    assert (await served.vision.Query(query(options=options(model="fake")))).info.model == "fake"
    told = await failure(served.models.GetModel(model_service_pb2.GetModelRequest(model="gpt")))
    assert (told.code, told.fields) == (grpc.StatusCode.NOT_FOUND, ["model"])


async def test_a_long_complaint_is_cut_to_what_every_client_takes(serve):
    served = await serve()
    told = await failure(served.vision.Query(query(options=options(model="\U0001f985" * 512))))
    assert told.code is grpc.StatusCode.NOT_FOUND
    assert told.message.endswith("…")
    assert len(told.message) < 600


async def test_a_long_name_of_the_callers_own_is_cut(serve):
    """Clients refuse trailers of more than 8 KiB, and would not see the status."""
    served = await serve()
    request = pb.RunSkillRequest(skill=pb.SkillTask(name="query"))
    request.skill.arguments.update({"question": "what?", "x" * 1_000_000: 1})
    told = await failure(served.vision.RunSkill(request))
    assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    (field,) = told.fields
    assert field.startswith("skill.arguments.xxx") and len(field) < 210
    assert told.message.startswith(field) and "is not an argument" in told.message


async def test_segment_on_moondream_2_is_a_failed_precondition(serve):
    served = await serve(family="moondream2")
    told = await failure(served.vision.Segment(segment()))
    assert told.code is grpc.StatusCode.FAILED_PRECONDITION
    assert told.reason == "SKILL_UNAVAILABLE"
    assert told.fields == ["options.model"]
    assert "can't segment" in told.message


async def test_a_full_queue_says_when_to_come_back(serve):
    entered, release = threading.Event(), threading.Event()

    def hold(fed):
        entered.set()
        assert release.wait(60)
        return 197

    served = await serve(FakeRuntime(LIMITS, hold), max_queue=1)
    held = [
        asyncio.ensure_future(served.vision.Query(query(max_tokens=1)))
        for _ in range(1 + LIMITS.max_batch_size)
    ]
    try:
        await until(lambda: served.engine.num_requests >= len(held))
        told = await failure(served.vision.Query(query()))
    finally:
        release.set()
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.reason == "QUEUE_FULL"
    assert told.retry_after_s == 1.0
    assert told.quota_subject == "anonymous", "whoever has no name"
    assert told.trailers["grpc-retry-pushback-ms"] == "1000"
    assert all(response.answers[0].text for response in await asyncio.gather(*held))


async def test_a_failed_step_is_internal_and_the_server_goes_on(serve):
    served = await serve()
    served.runtime.fail_next = ValueError("secret path /home/someone")
    told = await failure(served.vision.Query(query(options=options(request_id="mine"))))
    assert told.code is grpc.StatusCode.INTERNAL
    assert told.reason == "COMPUTATION_FAILED"
    assert "secret" not in repr(told)
    assert told.request_id == told.trailers["x-request-id"] == "mine"
    assert await answers(served)


async def test_an_unforeseen_exception_tells_nothing_but_the_request_id(serve, caplog):
    served = await serve()

    async def break_down(request):
        raise LookupError("secret")

    served.engine.start = break_down
    told = await failure(served.vision.Query(query(options=options(request_id="r-1"))))
    assert told.code is grpc.StatusCode.INTERNAL
    assert told.message == "internal error; the server's log has details under request id r-1"
    assert "secret" not in repr(told)
    (record,) = [r for r in caplog.records if "r-1" in r.getMessage()]
    assert record.exc_info[0] is LookupError


async def test_requests_before_the_model_is_ready_are_unavailable(serve):
    served = await serve(load=False)
    told = await failure(served.vision.Query(query()))
    assert told.code is grpc.StatusCode.UNAVAILABLE
    assert told.reason == "MODEL_NOT_READY"
    assert "loading" in told.message
    assert told.retry_after_s is not None


def subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_of_the_engine_has_a_row():
    missing = [
        cls
        for cls in {kestrel_engine.KestrelError, *subclasses(kestrel_engine.KestrelError)}
        if cls.__module__.startswith("kestrel_") and cls not in errors.TABLE
    ]
    assert missing == []


async def test_a_retrying_client_obeys_the_pushback(serve):
    """Initial metadata would tell a client's retry policy to give up, so a refused call must not send any."""
    served = await serve()
    calls = 0
    start = served.engine.start

    async def overloaded_once(request):
        nonlocal calls
        calls += 1
        if calls == 1:
            raise kestrel_engine.EngineOverloaded("full", retry_after_s=0.2)
        return await start(request)

    served.engine.start = overloaded_once
    policy = (
        '{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 3, "initialBackoff": "0.01s", '
        '"maxBackoff": "0.01s", "backoffMultiplier": 1, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}}]}'
    )
    async with grpc.aio.insecure_channel(
        served.server.addresses[0], options=[("grpc.service_config", policy)]
    ) as channel:
        stub = type(served.vision)(channel)
        started = asyncio.get_running_loop().time()
        assert (await stub.Query(query(max_tokens=2))).usage.output_tokens == 2
        assert asyncio.get_running_loop().time() - started >= 0.2
    assert calls == 2


@pytest.mark.parametrize(
    ("error", "subject"),
    [
        (kestrel_engine.QueueTimeout("the request waited 2 s"), "server"),
        (MessagesFull("the messages hold 9 of 9 bytes"), "server"),
        (
            RateExceeded("often", quota=kestrel_engine.Quota("camera", "calls at once", 9, 9)),
            "camera",
        ),
        (TooManyCalls("many", quota=kestrel_engine.Quota("", "calls", 9, 9)), "anonymous"),
    ],
)
def test_a_refusal_names_whose_limit_was_reached(error, subject):
    _, message, trailers = status_of(error, "r-1")
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    quota = error_details_pb2.QuotaFailure()
    assert [quota.violations[:] for detail in status.details if detail.Unpack(quota)]
    [violation] = quota.violations
    assert (violation.subject, violation.description) == (subject, message)


async def test_an_error_tells_programs_what_they_need(strict):
    """Without the message's words: the field, what it has, what it may have, and the names that are known."""
    vision = strict.vision
    for call, metadata in (
        (
            vision.Query(query(options=options(model="gpt"))),
            {"field": "options.model", "value": "gpt", "known": "fake"},
        ),
        (
            vision.Caption(caption(image=encoded(bytes(60_000)))),
            {"field": "image", "value": "60000", "limit": "50000"},
        ),
        (
            vision.Query(query(max_tokens=4000)),
            {"field": "query.max_tokens", "value": "4000", "limit": "209"},
        ),
        (vision.Query(query(question="")), {"field": "query.question"}),
    ):
        assert (await failure(call)).metadata == metadata


def test_a_quota_tells_programs_its_limit():
    quota = kestrel_engine.Quota("camera", "calls at once", 9, 8)
    _, _, trailers = status_of(TooManyCalls("many", quota=quota), "r-1")
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.metadata == {"value": "9", "limit": "8", "unit": "calls at once"}
