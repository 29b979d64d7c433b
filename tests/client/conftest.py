"""A real gRPC server in this process with canned, realistic answers: the peer that the SDK is tested against.

What a request asks for in words decides what the peer does: see Peer.
"""

from __future__ import annotations

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
    vision_service_pb2,
    vision_service_pb2_grpc,
)

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
SEED = 2**63 + 7
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

    def Query(self, request: Any, context: Any) -> vision_service_pb2.QueryResponse:
        self._receive(request, request.question, context)
        response = vision_service_pb2.QueryResponse(
            answer=ANSWER, **self._common(request, with_image=request.HasField("image"))
        )
        if request.sampling.logprobs:
            response.logprobs.CopyFrom(LOGPROBS)
        if request.reasoning:
            span = vision_service_pb2.GroundingSpan(
                start=8, end=18, points=[common_pb2.Point(x=x, y=y) for x, y in POINTS]
            )
            response.reasoning.text = REASONING
            response.reasoning.grounding.append(span)
        return response

    def Caption(self, request: Any, context: Any) -> vision_service_pb2.CaptionResponse:
        self._receive(request, "", context)
        return vision_service_pb2.CaptionResponse(caption=ANSWER, **self._common(request))

    def Point(self, request: Any, context: Any) -> vision_service_pb2.PointResponse:
        self._receive(request, request.object, context)
        points = [common_pb2.Point(x=x, y=y) for x, y in POINTS]
        return vision_service_pb2.PointResponse(points=points, **self._common(request))

    def Detect(self, request: Any, context: Any) -> vision_service_pb2.DetectResponse:
        self._receive(request, request.object, context)
        boxes = [common_pb2.Box(x_min=a, y_min=b, x_max=c, y_max=d) for a, b, c, d in BOXES]
        return vision_service_pb2.DetectResponse(objects=boxes, **self._common(request))

    def Segment(self, request: Any, context: Any) -> vision_service_pb2.SegmentResponse:
        self._receive(request, request.object, context)
        a, b, c, d = BOXES[0]
        response = vision_service_pb2.SegmentResponse(
            svg_path=SVG_PATH,
            box=common_pb2.Box(x_min=a, y_min=b, x_max=c, y_max=d),
            **self._common(request),
        )
        if request.mask_format == vision_service_pb2.MASK_FORMAT_RLE:
            # 8 x 4 pixels, the box covers columns 1 to 3 and rows 1 to 2.
            counts = [5, 2, 2, 2, 2, 2, 17]
            response.mask.width, response.mask.height = 8, 4
            response.mask.rle.counts.extend(counts)
        return response

    # The streams: the result comes from the unary method, the events from the result.

    def StreamQuery(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Query(request, context)
        thoughts: list[dict[str, Any]] = []
        if final.HasField("reasoning"):
            thoughts = [
                {"reasoning_delta": vision_service_pb2.ReasoningDelta(text=t, output_tokens=i + 1)}
                for i, t in enumerate(_pieces(final.reasoning.text))
            ]
        deltas = self._text_deltas(final.answer, request.question, context)
        events = itertools.chain(thoughts, deltas)
        yield from self._stream(vision_service_pb2.StreamQueryResponse, final, events, request)

    def StreamCaption(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Caption(request, context)
        deltas = self._text_deltas(final.caption, "", context)
        yield from self._stream(vision_service_pb2.StreamCaptionResponse, final, deltas, request)

    def StreamPoint(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Point(request, context)
        objects = [{"object": p} for p in final.points]
        yield from self._stream(vision_service_pb2.StreamPointResponse, final, objects, request)

    def StreamDetect(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Detect(request, context)
        objects = [{"object": b} for b in final.objects]
        yield from self._stream(vision_service_pb2.StreamDetectResponse, final, objects, request)

    def StreamSegment(self, request: Any, context: Any) -> Iterator[Any]:
        final = self.Segment(request, context)
        pieces = ["M 0 0", "L 1 0", "L 1 1", "L 0 1", "z"]
        events: list[dict[str, Any]] = [{"object": final.box}]
        events += [{"path_piece": vision_service_pb2.PathPiece(path=p)} for p in pieces]
        yield from self._stream(vision_service_pb2.StreamSegmentResponse, final, events, request)

    # Several at once, and any by name: put together from the methods above.

    def Analyze(self, request: Any, context: Any) -> vision_service_pb2.AnalyzeResponse:
        results = []
        for position, task in enumerate(request.tasks):
            kind = task.WhichOneof("task")
            wanted = getattr(vision_service_pb2, f"{kind.capitalize()}Request")
            alone = wanted.FromString(getattr(task, kind).SerializeToString())
            outcome = getattr(self, kind.capitalize())(alone, context)
            key = task.key if task.HasField("key") else str(position)
            results.append(vision_service_pb2.TaskResult(key=key, **{kind: outcome}))
        return vision_service_pb2.AnalyzeResponse(results=results, image_id=IMAGE_ID)

    def RunSkill(self, request: Any, context: Any) -> vision_service_pb2.RunSkillResponse:
        self._receive(request, "", context)
        response = vision_service_pb2.RunSkillResponse(**self._common(request))
        response.output.update({"skill": request.skill, "yes": True})
        return response

    # What the methods share.

    def _text_deltas(self, text: str, words: str, context: Any) -> Iterator[dict[str, Any]]:
        i = 0
        while True:
            for piece in _pieces(text):
                i += 1
                yield {"text_delta": vision_service_pb2.TextDelta(text=piece, output_tokens=i)}
            if words != "endless" or not context.is_active():
                return
            time.sleep(0.01)

    def _stream(self, kind: Any, final: Any, events: Any, request: Any) -> Iterator[Any]:
        started = vision_service_pb2.StreamStarted(request_id=final.request_id, model=final.model)
        sequence = 0
        yield kind(sequence=0, started=started)
        for sequence, event in enumerate(events, start=1):
            yield kind(sequence=sequence, **event)
        if getattr(request, "question", "") != "cut":
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

    def _common(self, request: Any, with_image: bool = True) -> dict[str, Any]:
        size = common_pb2.ImageSize(width=8, height=4) if with_image else None
        return {
            "finish_reason": common_pb2.FINISH_REASON_STOP,
            "usage": common_pb2.Usage(
                input_tokens=740, output_tokens=9, cached_tokens=730, image_tokens=729
            ),
            "timings": common_pb2.Timings(
                queue_time_ms=1.5,
                preprocess_time_ms=2,
                prefill_time_ms=3,
                decode_time_ms=4,
                ttft_ms=5,
                processing_time_ms=6,
                total_time_ms=7.25,
            ),
            "model": request.options.model or "kestrel-tiny",
            "request_id": request.options.request_id or "made-by-server",
            "image_size": size,
            "seed": SEED,
        }


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
        skills=["query", "caption", "point", "detect", "segment"],
        default_max_objects=150,
        weights_fingerprint="0badcafe",
        parameter_count=8_000_000,
        license="Apache-2.0",
        state=model_service_pb2.MODEL_STATE_READY,
    )

    def ListModels(self, request: Any, context: Any) -> model_service_pb2.ListModelsResponse:
        return model_service_pb2.ListModelsResponse(models=[self.model])

    def GetModel(self, request: Any, context: Any) -> model_service_pb2.GetModelResponse:
        if request.HasField("name") and request.name != self.model.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no model named {request.name}")
        return model_service_pb2.GetModelResponse(model=self.model)

    def GetServerInfo(self, request: Any, context: Any) -> model_service_pb2.GetServerInfoResponse:
        return model_service_pb2.GetServerInfoResponse(
            server_version="0.1.0",
            api_version="kestrel.v1",
            library_versions={"grpcio": grpc.__version__},
            device="cpu",
            dtype="float32",
            default_model="kestrel-tiny",
            limits=model_service_pb2.ServerLimits(max_batch_size=4, default_top_p=0.9),
            capabilities=model_service_pb2.ServerCapabilities(
                skills=["query"], image_formats=["jpeg", "png"], reasoning=True
            ),
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
            {"field": "sampling.top_p", "description": "1.5 is not in (0, 1]"},
            {"field": "question", "description": "must not be empty"},
        ]
    )
    _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "two fields are wrong", [bad_request])


def _overload(context: Any, pushback_ms: int) -> None:
    retry = error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)
    )
    info = error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="kestrel")
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


@pytest.fixture
async def async_client(peer: RunningPeer) -> AsyncIterator[AsyncKestrelClient]:
    async with AsyncKestrelClient(peer.target, timeout=60) as client:
        yield client
