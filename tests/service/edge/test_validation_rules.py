"""The server refuses what the .proto files forbid, and nothing that they allow.

protovalidate evaluates the rules in the files (`buf.validate`). The server's own checks are written by hand, because it
must name the field, the value and the limit, and knows limits that no file can state. Both must agree on every value
around every limit, one at a time and several together.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pyvips
from google.protobuf.message import Message
from google.rpc import status_pb2

from kestrel_client._pb.kestrel.v1 import (
    admin_service_pb2,
    batch_service_pb2,
    common_pb2,
    image_service_pb2,
    model_service_pb2,
    vision_service_pb2,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine.types.step import RuntimeLimits
from kestrel_grpc.settings.batches import BatchesConfig
from kestrel_grpc.settings.security import SecurityConfig
from tests.engine.fakes import fake_model
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import Serve, Served
from tests.service.edge.validation_rules import Rules
from tests.service.statuses import fields_of, read

EOS = 0
LIMITS = RuntimeLimits(
    num_pages=2000, page_size=82, max_batch_size=3, max_seq_length=150_000, vocab_size=400
)
"""Room for the longest texts together."""

KEY = "the-key-of-an-administrator"
METADATA = (("authorization", f"Bearer {KEY}"),)
FILE = pyvips.Image.black(64, 64, bands=3).copy(interpretation="srgb").pngsave_buffer()

STRICTER = [
    re.compile(pattern)
    for pattern in (
        # Limits that depend on the content or on several fields.
        r"^(image|images(\[\d+\])?): ",
        r"(image|images\[\d+\])\.raw\.data: has \d+ bytes; \d+x\d+ pixels",
        r"^info\.sha256: is not the hash",
        r"^(info\.size_bytes|chunk): .* bytes",
        r"^info\.total_requests: .* requests arrived",
        r"^module: no module of this name",
        # What a constraint says. One of four fields.
        r"constraint\.(regex|grammar|json_schema): (?!has|must)",
        r"constraint: needs exactly one",
        # The number and the size of tiles, and the size of a region.
        r"tiles: .* (tiles; must be|the least is)",
        r"(image|images\[\d+\])\.region: (needs|covers)",
        # The model's own limit.
        r"(image|images\[\d+\])\.max_crops: is \d+; must be from 1 to",
        # What the model's features are, and the adapter that made them.
        r"image\.features\.(rows|dimensions): is -?\d+; this model has",
        r"image\.features\.data: has \d+ bytes; \d+ x \d+ numbers",
        r"image\.features\.adapter: was made with",
        # One field needs another.
        r"top_logprobs: is \d+ without logprobs",
        r"max_reasoning_tokens: is set without reasoning",
        r"answer_start: is set with reasoning",
        # The size of the vocabulary.
        r"logit_bias\[\d+\]: .* is not an id of the model",
        # The context.
        r"max_(reasoning_)?tokens: .* exceeds the",
        # A stream has one sample.
        r"num_samples: must be 1 in a stream",
        # Only white space.
        r"(question|objects\[\d+\]): must not be empty",
        # It depends on another field, or on another message.
        r"history: has \d+ UTF-8 bytes with the question",
        r"faces: is set beside an eye",
        r"max_faces: limits the faces that are found",
        r"accurate: looks from places in a face",
        r"config\.late: needs latency_budget_ms",
        r"num_images: ",
        r"^(config|frame): ",
        r"^frame\.(image|frame_id): ",
        # Tokens of pages, and models.
        r"page_token: is not the next_page_token",
        r"^source: .* is no known model",
        r"^settings\[.*\]: ",
        r"config\.options\.request_id: must not be set",
    )
]
"""Messages of the server for requests that the files' rules allow. The comments in the files state these limits."""


@pytest.fixture(scope="module")
def rules() -> Rules:
    return Rules()


@pytest.fixture
async def served(serve: Serve, tmp_path: Path) -> Served:
    runtime = FakeRuntime(LIMITS, lambda fed: EOS)
    config = {
        "security": SecurityConfig(api_key=KEY),
        "batches": BatchesConfig(path=str(tmp_path / "batches.db")),
    }
    return await serve(runtime, server_config=config)


def raw() -> common_pb2.Image:
    image = common_pb2.RawImage(data=b"1", width=1, height=1, format=common_pb2.PIXEL_FORMAT_GRAY8)
    return common_pb2.Image(raw=image, background="#ffffff")


PART = common_pb2.Image(encoded=FILE, region=common_pb2.Box(x_min=0.25, x_max=1, y_max=0.75))
VISION = fake_model("moondream3").vision
FEATURES = common_pb2.Image(
    features=common_pb2.ImageFeatures(
        data=b"\x00\x3c" * (VISION.grid**2 * VISION.proj_out_dim), rows=VISION.grid**2, dimensions=VISION.proj_out_dim,
        width=3, height=2, adapter="mine",
    )
)  # fmt: skip
TILES = pb.Tiles(rows=2, columns=2, overlap=0.25)
SAMPLING = common_pb2.Sampling(temperature=0.0, top_p=1.0, min_p=0.5, top_k=7, seed=3)
TEXT = common_pb2.TextOptions(
    stop=["END"], logit_bias=[common_pb2.LogitBias(id=7, bias=1.0)], logprobs=True, top_logprobs=2,
    repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5,
)  # fmt: skip
OPTIONS = common_pb2.RequestOptions(
    request_id="mine", priority="PRIORITY_LOW", model="fake", cache_salt="salt"
)
FRAME_OPTIONS = common_pb2.RequestOptions(priority="PRIORITY_LOW", model="fake")
ADAPTER = common_pb2.RequestOptions(adapter="scratches@10")
REFS = [
    common_pb2.SpatialRef(point=common_pb2.Point(x=0.5, y=0.5)),
    common_pb2.SpatialRef(box=common_pb2.Box(x_min=0.25, y_min=0.25, x_max=0.75, y_max=0.75)),
]
TURNS = [pb.Turn(question="which?", answer="this", num_images=1)]
QUERY = pb.QueryTask(
    question="what?", spatial_refs=REFS, history=[pb.Turn(question="which?", answer="this")], reasoning=True,
    system="Be brief.", answer_start="", abstention=pb.Abstention(objects=["cat"], max_absence=0.5),
    max_tokens=1, max_reasoning_tokens=5, sampling=SAMPLING, text=TEXT,
)  # fmt: skip
SAMPLES = pb.QueryTask(question="what?", history=TURNS, num_samples=2)
CAPTION = pb.CaptionTask(length="CAPTION_LENGTH_SHORT", max_tokens=1, sampling=SAMPLING, text=TEXT)
LOCATE: dict[str, Any] = {
    "objects": ["cat", "dog"], "max_objects": 1, "min_score": 0.5, "max_tokens": 9, "sampling": SAMPLING,
}  # fmt: skip
POINT = pb.PointTask(**LOCATE, spatial_refs=REFS)
DETECT = pb.DetectTask(**LOCATE, max_overlap=0.5)
SEGMENT = pb.SegmentTask(
    objects=["cat"], spatial_refs=REFS, min_score=0.5, mask_format="MASK_FORMAT_SVG", refinement="REFINEMENT_NONE",
    max_tokens=9, sampling=SAMPLING,
)  # fmt: skip
EYES = pb.GazeTask(eyes=[common_pb2.Point(x=0.5, y=0.5)], max_tokens=9, sampling=SAMPLING)
FACES = pb.GazeTask(
    faces=[common_pb2.Box(x_min=0.25, y_min=0.25, x_max=0.75, y_max=0.75)], sampling=SAMPLING
)
EVERY_FACE = pb.GazeTask(max_faces=2, sampling=SAMPLING)
SKILL = pb.SkillTask(
    name="query", arguments={"question": "what?"}, max_tokens=1, sampling=SAMPLING, text=TEXT
)
EMBED = pb.EmbedTask(
    parts="EMBEDDING_PARTS_IMAGE", pooling="EMBEDDING_POOLING_MEAN", dtype="EMBEDDING_DTYPE_FLOAT16"
)
CONSTRAINTS = [
    common_pb2.Constraint(choices=common_pb2.Choices(texts=["a"])),
    common_pb2.Constraint(regex="a"),
    common_pb2.Constraint(grammar='start: "a"'),
    common_pb2.Constraint(json_schema="{}"),
]
TASKS: list[dict[str, Any]] = [
    *({"query": QUERY}, {"caption": CAPTION}, {"point": POINT}),
    *({"detect": DETECT}, {"segment": SEGMENT}, {"skill": SKILL}),
    {"gaze": EVERY_FACE},
]
SHARED: dict[str, Any] = {"image": raw(), "options": OPTIONS}
CONFIG = pb.FramesConfig(
    tasks=[pb.Task(key="mine", detect=DETECT)],
    latency_budget_ms=1000,
    late="LATE_FRAMES_OVERVIEW",
    max_in_flight=2,
    last_frame_id=3,
    options=FRAME_OPTIONS,
)
OPENING = pb.StreamFramesRequest(config=CONFIG)
FRAME = pb.StreamFramesRequest(frame=pb.Frame(frame_id=7, image=raw()))
BATCHED = batch_service_pb2.CreateBatchRequest(
    request={"custom_id": "mine", "detect": {"image": raw(), "detect": {"objects": ["cup"]}}}
)
VALID: dict[str, list[Message]] = {
    "VisionService/Query": [
        pb.QueryRequest(images=[raw()], query=QUERY, options=OPTIONS),
        pb.QueryRequest(images=[common_pb2.Image(encoded=FILE)], query=SAMPLES, options=ADAPTER),
        *(
            pb.QueryRequest(
                query=pb.QueryTask(
                    question="what?",
                    max_tokens=1,
                    text=common_pb2.TextOptions(constraint=constraint),
                )
            )
            for constraint in CONSTRAINTS
        ),
    ],
    "VisionService/Caption": [
        pb.CaptionRequest(**SHARED, caption=CAPTION),
        pb.CaptionRequest(
            image=common_pb2.Image(image_id="img_0"), caption=pb.CaptionTask(num_samples=2)
        ),
        pb.CaptionRequest(image=FEATURES),
    ],
    "VisionService/Point": [pb.PointRequest(**SHARED, point=POINT)],
    "VisionService/Detect": [
        pb.DetectRequest(**SHARED, detect=DETECT),
        pb.DetectRequest(image=PART, detect=pb.DetectTask(objects=["cat"], tiles=TILES)),
    ],
    "VisionService/Segment": [pb.SegmentRequest(**SHARED, segment=SEGMENT)],
    "VisionService/Gaze": [pb.GazeRequest(**SHARED, gaze=task) for task in (EYES, FACES, EVERY_FACE)],
    "VisionService/Analyze": [pb.AnalyzeRequest(**SHARED, tasks=[pb.Task(key="mine", **task)]) for task in TASKS],
    "VisionService/RunSkill": [pb.RunSkillRequest(**SHARED, skill=SKILL)],
    "VisionService/StreamQuery": [pb.QueryRequest(images=[raw()], query=QUERY, options=OPTIONS)],
    "VisionService/StreamCaption": [pb.CaptionRequest(**SHARED, caption=CAPTION)],
    "VisionService/StreamPoint": [pb.PointRequest(**SHARED, point=POINT)],
    "VisionService/StreamDetect": [pb.DetectRequest(**SHARED, detect=DETECT)],
    "VisionService/StreamSegment": [pb.SegmentRequest(**SHARED, segment=SEGMENT)],
    "VisionService/StreamGaze": [pb.GazeRequest(**SHARED, gaze=EYES)],
    "VisionService/StreamAnalyze": [pb.AnalyzeRequest(**SHARED, tasks=[pb.Task(key="mine", query=QUERY)])],
    "VisionService/StreamRunSkill": [pb.RunSkillRequest(**SHARED, skill=SKILL)],
    "VisionService/Embed": [pb.EmbedRequest(**SHARED, embed=EMBED)],
    "VisionService/StreamEmbed": [pb.EmbedRequest(**SHARED, embed=EMBED)],
    "VisionService/CountTokens": [
        pb.CountTokensRequest(
            images=[raw()], tasks=[pb.Task(key="mine", query=QUERY)], options=OPTIONS
        )
    ],
    "VisionService/StreamFrames": [OPENING, FRAME],
    "ImageService/PutImage": [image_service_pb2.PutImageRequest(image=raw())],
    "ImageService/DeleteImage": [image_service_pb2.DeleteImageRequest(image_id="img_0")],
    "ImageService/UploadImage": [
        image_service_pb2.UploadImageRequest(
            info=image_service_pb2.UploadInfo(
                size_bytes=len(FILE), sha256=hashlib.sha256(FILE).digest()
            )
        )
    ],
    "ModelService/ListModels": [model_service_pb2.ListModelsRequest(page_size=2)],
    "ModelService/GetModel": [model_service_pb2.GetModelRequest(model="fake")],
    "ModelService/ListAdapters": [model_service_pb2.ListAdaptersRequest(model="fake", page_size=2)],
    "BatchService/CreateBatch": [
        batch_service_pb2.CreateBatchRequest(info={"total_requests": 1}), BATCHED,
    ],
    "BatchService/GetBatch": [batch_service_pb2.GetBatchRequest(batch_id="batch_0")],
    "BatchService/ListBatches": [batch_service_pb2.ListBatchesRequest(page_size=2)],
    "BatchService/CancelBatch": [batch_service_pb2.CancelBatchRequest(batch_id="batch_0")],
    "BatchService/DeleteBatch": [batch_service_pb2.DeleteBatchRequest(batch_id="batch_0")],
    "BatchService/StreamBatchResults": [
        batch_service_pb2.StreamBatchResultsRequest(batch_id="batch_0", start_index=0)
    ],
    "AdminService/CancelRequest": [admin_service_pb2.CancelRequestRequest(request_id="mine")],
    "AdminService/SetLogLevel": [
        admin_service_pb2.SetLogLevelRequest(
            level="LOG_LEVEL_INFO", module="kestrel_grpc.services.admin"
        )
    ],
    "AdminService/StartProfile": [admin_service_pb2.StartProfileRequest(duration_ms=1000, steps=1)],
    "AdminService/StartCapture": [admin_service_pb2.StartCaptureRequest(requests=1)],
    "AdminService/LoadModel": [
        admin_service_pb2.LoadModelRequest(source="kestrel-small", settings={"kv-cache-gib": "1"})
    ],
    "AdminService/UnloadModel": [admin_service_pb2.UnloadModelRequest(model="fake", grace_ms=1000)],
    "AdminService/SetDefaultModel": [admin_service_pb2.SetDefaultModelRequest(model="fake")],
    "AdminService/LoadAdapter": [admin_service_pb2.LoadAdapterRequest(adapter="mine@1", model="fake")],
    "AdminService/UnloadAdapter": [admin_service_pb2.UnloadAdapterRequest(adapter="mine@1", model="fake")],
}  # fmt: skip
"""Requests that no rule refuses, with all fields that have rules. Of a stream of frames, the first messages."""

FILES = (
    *(vision_service_pb2, image_service_pb2, model_service_pb2),
    *(batch_service_pb2, admin_service_pb2),
)
METHODS = {
    f"{service.name}/{method.name}": method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@dataclass(frozen=True)
class Refusal:
    """The fields and messages of a call, or of its tasks, that failed with INVALID_ARGUMENT."""

    fields: list[str]
    messages: list[str]

    def __bool__(self) -> bool:
        return bool(self.messages)

    @property
    def is_stricter(self) -> bool:
        return all(any(p.search(message) for p in STRICTER) for message in self.messages)


async def ask(served: Served, method: str, data: bytes) -> Refusal:
    """Sends a request. Statuses other than INVALID_ARGUMENT do not refuse its values."""
    descriptor = METHODS[method]
    read_answer = descriptor.output_type._concrete_class.FromString
    path = f"/kestrel.v1.{method}"
    try:
        if descriptor.client_streaming:
            [sent] = await served.send(method, stream_of(method, data), metadata=METADATA)
            answer = read_answer(sent)
            if method == "BatchService/CreateBatch":  # The results tell what the method refuses.
                results, first = batch_service_pb2.StreamBatchResultsRequest, answer.batch.batch_id
                sent, *_ = await served.send(
                    "BatchService/StreamBatchResults",
                    [results(batch_id=first)],
                    metadata=METADATA,
                )
                answer = batch_service_pb2.StreamBatchResultsResponse.FromString(sent)
        elif descriptor.server_streaming:
            stream = served.channel.unary_stream(path, response_deserializer=read_answer)
            *_, last = [event async for event in stream(data, metadata=METADATA)]
            answer = getattr(last, "final", None)
        else:
            call = served.channel.unary_unary(path, response_deserializer=read_answer)
            answer = await call(data, metadata=METADATA)
    except grpc.RpcError as error:
        told = read(error)
        assert told.code not in FAULTS, error
        if told.code is not grpc.StatusCode.INVALID_ARGUMENT:
            return Refusal([], [])
        return Refusal(told.fields, [told.message])
    refused = [
        each for each in statuses(answer) if each.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    ]
    inside = "request.detect." if method == "BatchService/CreateBatch" else ""
    return Refusal(
        [inside + field for each in refused for field in fields_of(each)],
        [each.message for each in refused],
    )


def stream_of(method: str, data: bytes) -> list[bytes]:
    """The messages of a stream of requests, of which ``data`` is one."""
    if method.endswith("UploadImage"):
        return [data, image_service_pb2.UploadImageRequest(chunk=FILE).SerializeToString()]
    if method.endswith("CreateBatch"):
        has_info = batch_service_pb2.CreateBatchRequest.FromString(data).HasField("info")
        return [data, BATCHED.SerializeToString()] if has_info else [data]
    if pb.StreamFramesRequest.FromString(data).HasField("frame"):
        return [OPENING.SerializeToString(), data]
    return [data, FRAME.SerializeToString()]


def statuses(message: Any) -> Iterator[status_pb2.Status]:
    """All statuses in a message: of tasks, names and frames."""
    if not isinstance(message, Message):
        return
    if isinstance(message, status_pb2.Status):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                yield from statuses(each)


FAULTS = (
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def agrees(refused: list[str], refusal: Refusal) -> bool:
    """Whether the server refuses a request for a field that protovalidate refuses, or for a stricter limit."""
    if not refused:
        return not refusal or refusal.is_stricter
    return bool(refusal) and (
        refusal.is_stricter or all(names(field, refused) for field in refusal.fields)
    )


def names(field: str, refused: list[str]) -> bool:
    """Whether ``field`` is one of the refused fields, a message that holds one, or a field of one that is missing."""
    return any(
        path == field or path.startswith((f"{field}.", f"{field}[")) or field.startswith(f"{path}.")
        for path in refused
    )


def test_the_valid_requests_are_valid_and_cover_every_rule(rules: Rules) -> None:
    requests = {method: METHODS[method].input_type for method in METHODS}
    stated = set().union(
        *(
            rules.stated(rules.message(kind._concrete_class()).DESCRIPTOR)
            for kind in requests.values()
        )
    )
    assert len(stated) > 40
    tried = set()
    for method, messages in VALID.items():
        for plain in messages:
            message = rules.message(plain)
            assert rules.refused(message) == [], method
            tried |= {change.rule for change in rules.changes(message)}
    assert stated - tried == set()


def restates(method: str) -> bool:
    """Whether the server checks the method's fields as those of another method."""
    return METHODS[method].server_streaming


@pytest.mark.parametrize(
    ("method", "every"),
    [
        *((method, False) for method in VALID if not restates(method)),
        *(pytest.param(method, not restates(method), marks=pytest.mark.slow) for method in VALID),
    ],
)
async def test_the_server_agrees_on_every_value_around_every_limit(
    served: Served, rules: Rules, method: str, every: bool
) -> None:
    """Or on one value of each rule, without ``every``."""
    differ, tried = [], set()
    for plain in VALID[method]:
        valid = await ask(served, method, plain.SerializeToString())
        assert not valid or valid.is_stricter, valid
        changes = list(rules.changes(rules.message(plain)))
        if not every:
            changes = list({change.rule: change for change in changes}.values())
        for change in changes:
            if change.key in tried:
                continue
            tried.add(change.key)
            message = rules.message(plain)
            change.apply_to(message)
            refused, refusal = (
                rules.refused(message),
                await ask(served, method, message.SerializeToString()),
            )
            if not agrees(refused, refusal):
                differ.append(f"{change}: protovalidate {refused}, server {refusal}")
    assert differ == []


async def test_the_server_agrees_on_several_values_at_once(served: Served, rules: Rules) -> None:
    chance = random.Random(20261122)
    plain = VALID["VisionService/Query"][0]
    changes = [
        change
        for change in rules.changes(rules.message(plain))
        # An unknown model or image is refused before other fields are checked.
        if not change.rule.endswith(
            ("RequestOptions.model", "Image.image_id", "RequestOptions.adapter")
        )
    ]
    num_refused = 0
    for _ in range(100):
        chosen = chance.sample(changes, 3)
        message = rules.message(plain)
        for change in chosen:
            change.apply_to(message)
        refused = rules.refused(message)
        refusal = await ask(served, "VisionService/Query", message.SerializeToString())
        assert agrees(refused, refusal), ([str(c) for c in chosen], refused, refusal)
        num_refused += bool(refused)
    assert 25 < num_refused < 100
