"""A real gRPC server in this process with canned, realistic answers: the peer that the SDK is tested against.

What a request asks for in words decides what the peer does: see Peer.
"""

import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from kestrel_client import AsyncKestrelClient, KestrelClient
from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    common_pb2,
    image_service_pb2,
    image_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    vision_service_pb2_grpc,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.threaded import Threaded

ANSWER = "Two red circles — één is größer. 👍"
REASONING = "I see 👀 a circle here."
POINTS = [(0.25, 0.5), (0.75, 0.125)]
BOXES = [(0.125, 0.25, 0.5, 0.75), (0.5, 0.5, 1.0, 1.0)]
LOGPROBS = common_pb2.Logprobs(
    tokens=[
        common_pb2.TokenLogprob(
            text="Two",
            utf8=b"Two",
            id=7,
            logprob=-0.25,
            top=[common_pb2.TokenLogprob(text="Too", utf8=b"Too", id=8, logprob=-2.0)],
        ),
        common_pb2.TokenLogprob(text="\ufffd", utf8=b"\xf0", id=9, logprob=-1.5),
    ],
    sum=-1.75,
    mean=-0.875,
)
SVG_PATH = "M 0 0 L 1 0 L 1 1 L 0 1 z"
SEED = 2**62 + 7
IMAGE_ID = "img_" + 32 * "7"


class Peer(vision_service_pb2_grpc.VisionServiceServicer):
    """Answers by the question or object: "bad" is refused, "busy N" refused N times, "never" busy with no retry,
    "slow" goes on until cancelled, "endless" streams until cancelled, "cut" ends without a result; else all is well."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.cancelled = threading.Event()
        self.attempts = 0

    # The unary methods.

    def Query(self, request: Any, context: Any) -> pb.QueryResponse:
        task = request.query
        self._receive(request, task.question, context)
        answer = _answer(task)
        if task.reasoning:
            span = pb.GroundingSpan(
                start=8, end=18, points=[common_pb2.Point(x=x, y=y) for x, y in POINTS]
            )
            answer.reasoning.text = REASONING
            answer.reasoning.grounding.append(span)
        return pb.QueryResponse(answers=[answer], **self._common(request, len(request.images)))

    def Caption(self, request: Any, context: Any) -> pb.CaptionResponse:
        self._receive(request, "", context)
        return pb.CaptionResponse(captions=[_answer(request.caption)], **self._common(request))

    def Point(self, request: Any, context: Any) -> pb.PointResponse:
        self._receive(request, request.point.objects[0], context)
        found = [
            pb.Detection(label=name, score=0.75, point=common_pb2.Point(x=x, y=y))
            for name in request.point.objects
            for x, y in POINTS
        ]
        return pb.PointResponse(detections=found, **self._found(request, request.point))

    def Detect(self, request: Any, context: Any) -> pb.DetectResponse:
        self._receive(request, request.detect.objects[0], context)
        found = [
            pb.Detection(label=name, score=0.75, box=_box(*edges))
            for name in request.detect.objects
            for edges in BOXES
        ]
        return pb.DetectResponse(detections=found, **self._found(request, request.detect))

    def Segment(self, request: Any, context: Any) -> pb.SegmentResponse:
        task = request.segment
        self._receive(request, task.objects[0], context)
        outline = pb.Outline(svg_path=SVG_PATH)
        if task.mask_format == pb.MASK_FORMAT_RLE:
            # 8 x 4 pixels, the box covers columns 1 to 3 and rows 1 to 2.
            counts = [5, 2, 2, 2, 2, 2, 17]
            outline.mask.width, outline.mask.height = 8, 4
            outline.mask.rle.counts.extend(counts)
        found = [
            pb.Detection(label=name, score=0.75, box=_box(*BOXES[0]), outline=outline)
            for name in task.objects
        ]
        return pb.SegmentResponse(detections=found, **self._found(request, task))

    def Gaze(self, request: Any, context: Any) -> pb.GazeResponse:
        task, stop = request.gaze, common_pb2.FINISH_REASON_STOP
        self._receive(request, "", context)
        eyes = [pb.Gaze(eye=eye, finish_reason=stop, absence=0.75) for eye in task.eyes]
        faces = [*task.faces] or [_box(*edges) for edges in BOXES]
        found = [
            pb.Gaze(
                eye=common_pb2.Point(x=0.5, y=0.5), face=face, target=common_pb2.Point(x=0.25, y=1),
                score=0.75, absence=0.125, finish_reason=stop,
            )
            for face in faces
        ]  # fmt: skip
        search = pb.ObjectSearch(object="face", finish_reason=stop, absence=0.25)
        is_search = not task.eyes and not task.faces
        return pb.GazeResponse(
            gazes=eyes or found, search=search if is_search else None, **self._common(request)
        )

    # The streams: the result comes from the unary method, the events from the result.

    def StreamQuery(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Query(request, context)
        (answer,) = final.answers
        thoughts: list[dict[str, Any]] = []
        if answer.HasField("reasoning"):
            thoughts = [
                {"reasoning_delta": pb.ReasoningDelta(text=t, output_tokens=i + 1)}
                for i, t in enumerate(_pieces(answer.reasoning.text))
            ]
        deltas = self._text_deltas(answer.text, request.query.question, context)
        events = itertools.chain(thoughts, deltas)
        yield from self._stream(pb.StreamQueryResponse, final, events, request)

    def StreamCaption(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Caption(request, context)
        deltas = self._text_deltas(final.captions[0].text, "", context)
        yield from self._stream(pb.StreamCaptionResponse, final, deltas, request)

    def StreamPoint(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Point(request, context)
        yield from self._stream(pb.StreamPointResponse, final, _found(final), request)

    def StreamDetect(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Detect(request, context)
        yield from self._stream(pb.StreamDetectResponse, final, _found(final), request)

    def StreamSegment(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Segment(request, context)
        (found,) = final.detections
        pieces = [
            {"path_piece": pb.PathPiece(path=piece, label=found.label)}
            for piece in ("M 0 0", "L 1 0", "L 1 1", "L 0 1", "z")
        ]
        first = pb.Detection(label=found.label, score=found.score, box=found.box)
        ends = [{"search": each} for each in final.searches]
        events = [{"detection": first}, *pieces, *ends]
        yield from self._stream(pb.StreamSegmentResponse, final, events, request)

    def StreamGaze(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Gaze(request, context)
        events: list[dict[str, Any]] = []
        if final.HasField("search"):
            faces = [pb.Detection(label="face", score=0.75, box=each.face) for each in final.gazes]
            events = [*({"detection": each} for each in faces), {"search": final.search}]
        events += [{"gaze": each} for each in final.gazes]
        yield from self._stream(pb.StreamGazeResponse, final, events, request)

    # Several at once, and any by name: put together from the methods above.

    def Analyze(self, request: Any, context: Any) -> pb.AnalyzeResponse:
        results = []
        for position, task in enumerate(request.tasks):
            kind = task.WhichOneof("task")
            wanted = getattr(pb, f"{kind.capitalize()}Request")
            alone = wanted(**{kind: getattr(task, kind)})
            outcome = getattr(self, kind.capitalize())(alone, context)
            key = task.key if task.HasField("key") else str(position)
            results.append(pb.TaskResult(key=key, **{kind: outcome}))
        info = self._common(request)["info"]
        info.images[0].image_id = IMAGE_ID
        return pb.AnalyzeResponse(results=results, info=info)

    def RunSkill(self, request: Any, context: Any) -> pb.RunSkillResponse:
        self._receive(request, "", context)
        response = pb.RunSkillResponse(
            finish_reason=common_pb2.FINISH_REASON_STOP, **self._common(request)
        )
        response.output.update({"skill": request.skill.name, "yes": True})
        return response

    # What the methods share.

    def _text_deltas(self, text: str, words: str, context: Any) -> Iterator[dict[str, Any]]:
        i = 0
        while True:
            for piece in _pieces(text):
                i += 1
                yield {"text_delta": pb.TextDelta(text=piece, output_tokens=i)}
            if words != "endless" or not context.is_active():
                return
            time.sleep(0.01)

    def _stream(self, kind: Any, final: Any, events: Any, request: Any) -> Iterator[Any]:
        sequence = 0
        yield kind(sequence=0, started=final.info)
        for sequence, event in enumerate(events, start=1):
            yield kind(sequence=sequence, **event)
        if not hasattr(request, "query") or request.query.question != "cut":
            yield kind(sequence=sequence + 1, final=final)

    def _receive(self, request: Any, words: str, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.attempts += 1
        if words == "bad":
            _refuse(context)
        elif words.startswith("busy") and self.attempts <= int(words.split()[1]):
            _overload(context, pushback_ms=50)
        elif words == "never":
            _overload(context, pushback_ms=-1)
        elif words in ("slow", "endless"):
            context.add_callback(self.cancelled.set)  # such a call ends in no other way
            if words == "slow":
                self.cancelled.wait(60)

    def _common(self, request: Any, num_images: int = 1) -> dict[str, Any]:
        seen = common_pb2.SeenImage(size=common_pb2.ImageSize(width=8, height=4))
        return {
            "usage": common_pb2.Usage(
                input_tokens=740, output_tokens=9, cached_tokens=730, image_tokens=729
            ),
            "timings": common_pb2.Timings(
                queue_ms=1.5,
                preprocess_ms=2,
                prefill_ms=3,
                decode_ms=4,
                ttft_ms=5,
                processing_ms=6,
                total_ms=7.25,
            ),
            "info": common_pb2.RequestInfo(
                model=request.options.model or "kestrel-tiny",
                request_id=request.options.request_id or "made-by-server",
                images=[seen] * num_images,
                seed=SEED,
            ),
        }

    def _found(self, request: Any, task: Any) -> dict[str, Any]:
        stop = common_pb2.FINISH_REASON_STOP
        searches = [pb.ObjectSearch(object=n, finish_reason=stop) for n in task.objects]
        return {"searches": searches, **self._common(request)}


def _answer(task: Any) -> pb.Answer:
    answer = pb.Answer(text=ANSWER, seed=SEED, finish_reason=common_pb2.FINISH_REASON_STOP)
    if task.text.logprobs:
        answer.logprobs.CopyFrom(LOGPROBS)
    return answer


def _box(*edges: float) -> common_pb2.Box:
    return common_pb2.Box(x_min=edges[0], y_min=edges[1], x_max=edges[2], y_max=edges[3])


def _found(final: Any) -> list[dict[str, Any]]:
    """The events of a stream of objects."""
    found = [{"detection": each} for each in final.detections]
    return found + [{"search": each} for each in final.searches]


class Images(image_service_pb2_grpc.ImageServiceServicer):
    """Takes any image for one and the same."""

    def PutImage(self, request: Any, context: Any) -> image_service_pb2.PutImageResponse:
        return image_service_pb2.PutImageResponse(image=self._stored())

    def UploadImage(self, requests: Any, context: Any) -> image_service_pb2.UploadImageResponse:
        sum(len(request.chunk) for request in requests)
        return image_service_pb2.UploadImageResponse(image=self._stored())

    @staticmethod
    def _stored() -> image_service_pb2.StoredImage:
        size = common_pb2.ImageSize(width=8, height=4)
        return image_service_pb2.StoredImage(image_id=IMAGE_ID, size=size)


class Models(model_service_pb2_grpc.ModelServiceServicer):
    """One model."""

    model = model_service_pb2.Model(
        name="kestrel-tiny",
        family="moondream3",
        context_positions=1024,
        image_positions=729,
        skills=[
            model_service_pb2.Skill(name=name)
            for name in ("query", "caption", "point", "detect", "segment")
        ],
        device="cpu",
        dtype="float32",
        max_batch_size=4,
        weights_fingerprint="0badcafe",
        num_parameters=8_000_000,
        license="Apache-2.0",
        state=model_service_pb2.MODEL_STATE_READY,
    )

    def ListModels(self, request: Any, context: Any) -> model_service_pb2.ListModelsResponse:
        return model_service_pb2.ListModelsResponse(models=[self.model])

    def GetModel(self, request: Any, context: Any) -> model_service_pb2.GetModelResponse:
        if request.HasField("model") and request.model != self.model.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model named {request.model}")
        return model_service_pb2.GetModelResponse(model=self.model)

    def GetServerInfo(self, request: Any, context: Any) -> model_service_pb2.GetServerInfoResponse:
        return model_service_pb2.GetServerInfoResponse(
            server_version="0.1.0",
            api_version="kestrel.v1",
            library_versions={"grpcio": grpc.__version__},
            default_model="kestrel-tiny",
            limits=model_service_pb2.ServerLimits(default_top_p=0.9),
            image_formats=["jpeg", "png"],
        )

    def GetLoad(self, request: Any, context: Any) -> model_service_pb2.GetLoadResponse:
        return model_service_pb2.GetLoadResponse(
            ready=True,
            state=model_service_pb2.MODEL_STATE_READY,
            running_requests=3,
            utilization=0.75,
        )


class Administration(admin_service_pb2_grpc.AdminServiceServicer):
    """Does as it is told, to nothing."""

    def GetStatistics(self, request: Any, context: Any) -> admin_service_pb2.GetStatisticsResponse:
        return admin_service_pb2.GetStatisticsResponse(running_requests=3, calls=4)

    def SetLogLevel(self, request: Any, context: Any) -> admin_service_pb2.SetLogLevelResponse:
        return admin_service_pb2.SetLogLevelResponse()

    def CancelRequest(self, request: Any, context: Any) -> admin_service_pb2.CancelRequestResponse:
        return admin_service_pb2.CancelRequestResponse(cancelled_requests=1)


def _pieces(text: str) -> list[str]:
    return [word + " " for word in text.split(" ")[:-1]] + [text.split(" ")[-1]]


def _refuse(context: Any) -> None:
    bad_request = error_details_pb2.BadRequest(
        field_violations=[
            {"field": "query.sampling.top_p", "description": "1.5 is not in (0, 1]"},
            {"field": "query.question", "description": "must not be empty"},
        ]
    )
    _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "two fields are wrong", [bad_request])


def _overload(context: Any, pushback_ms: int) -> None:
    retry = error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)
    )
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="kestrel.internal")
    quota = error_details_pb2.QuotaFailure(
        violations=[{"subject": "camera", "description": "9 places in the queue, the share is 8"}]
    )
    status = _status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", [retry, info, quota])
    trailing = [*status.trailing_metadata, ("grpc-retry-pushback-ms", str(pushback_ms))]
    context.set_trailing_metadata(trailing)
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


def _status(code: grpc.StatusCode, message: str, details: list[Any]) -> Any:
    packed = []
    for detail in details:
        box = any_pb2.Any()
        box.Pack(detail)
        packed.append(box)
    return rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=message, details=packed)
    )


def _abort(context: Any, code: grpc.StatusCode, message: str, details: list[Any]) -> None:
    context.abort_with_status(_status(code, message, details))


class RunningPeer:
    """The peer's servicer, health and address."""

    def __init__(self, credentials: grpc.ServerCredentials | None = None) -> None:
        self.vision = Peer()
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._pool = futures.ThreadPoolExecutor(4)
        self._server = grpc.server(
            self._pool, options=[("grpc.max_receive_message_length", 64 * 1024 * 1024)]
        )
        vision_service_pb2_grpc.add_VisionServiceServicer_to_server(self.vision, self._server)
        image_service_pb2_grpc.add_ImageServiceServicer_to_server(Images(), self._server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(Models(), self._server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(Administration(), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", credentials)
        self.target = f"127.0.0.1:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()


@pytest.fixture
def peer() -> Iterator[RunningPeer]:
    running = RunningPeer()
    yield running
    running.stop()


@pytest.fixture
def start_peer() -> Callable[..., RunningPeer]:
    """For a test that wants a peer of its own, with credentials; the test stops it."""
    return RunningPeer


@pytest.fixture
def client(peer: RunningPeer) -> Iterator[KestrelClient]:
    with KestrelClient(peer.target, timeout=60) as client:
        yield client


@pytest.fixture(params=["sync", "async"])
async def either(
    request: pytest.FixtureRequest, peer: RunningPeer
) -> AsyncIterator[Threaded | AsyncKestrelClient]:
    """A client of each kind, both with the methods of the asynchronous one."""
    make = {"sync": lambda *a, **o: Threaded(KestrelClient(*a, **o)), "async": AsyncKestrelClient}
    async with make[request.param](peer.target, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(peer: RunningPeer) -> AsyncIterator[AsyncKestrelClient]:
    async with AsyncKestrelClient(peer.target, timeout=60) as client:
        yield client
