"""ModelInfer: the same answers as by kestrel.v1, in the vendor's JSON, and errors that name the input."""

from collections.abc import Callable
from typing import Any

import grpc

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from tests.engine.requests.test_presuppositions import shows
from tests.fake_runtime import FakeRuntime
from tests.kserve.conftest import infer, jpeg, output, raw_form
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure

KEYS = {"request_id", "finish_reason", "metrics"}
SETTINGS = {"TEMPERATURE": 0.0, "MAX_TOKENS": 12}


async def test_a_budget_limits_the_crops_of_the_image(serve):
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    wide = jpeg(1600, 400)
    for budget, crops in ((4, 5), (2, 3), (1, 1)):
        for skill in ({"SKILL": "query", "QUESTION": "What?"}, {"SKILL": "caption"}):
            asked = infer(IMAGE=wide, MAX_CROPS=budget, MAX_TOKENS=2, **skill)
            assert output(await stub.ModelInfer(asked))["metrics"]["num_crops"] == crops


async def test_every_skill_answers_as_kestrel_v1_does(serve):
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    encoded = jpeg()
    image = common_pb2.Image(encoded=encoded)
    settings: Any = {"sampling": {"temperature": 0}, "max_tokens": 12}
    dot = {"objects": ["dot"], **settings}
    given = {"IMAGE": encoded, **SETTINGS}

    got = output(await stub.ModelInfer(infer(id="seven", SKILL="query", QUESTION="What?", **given)))
    answer = await served.vision.Query(
        vision_service_pb2.QueryRequest(images=[image], query={"question": "What?", **settings})
    )
    assert got.keys() == {"answer", *KEYS} and got["answer"] == answer.answers[0].text
    assert got["request_id"] == "seven" and got["finish_reason"] in ("stop", "length")
    assert got["metrics"].keys() == {
        *("num_crops", "input_tokens", "output_tokens"),
        *("prefill_time_ms", "decode_time_ms", "ttft_ms"),
    }
    assert got["metrics"]["output_tokens"] == answer.usage.output_tokens

    got = output(await stub.ModelInfer(infer(SKILL="caption", LENGTH="short", **given)))
    short = {"length": vision_service_pb2.CAPTION_LENGTH_SHORT, **settings}
    caption = await served.vision.Caption(
        vision_service_pb2.CaptionRequest(image=image, caption=short)
    )
    assert got.keys() == {"caption", *KEYS} and got["caption"] == caption.captions[0].text

    got = output(await stub.ModelInfer(infer(SKILL="detect", OBJECT="dot", **given)))
    found = await served.vision.Detect(vision_service_pb2.DetectRequest(image=image, detect=dot))
    assert got.keys() == {"objects", "absence", *KEYS}
    assert got["absence"] == found.searches[0].absence
    scores = [each.score for each in found.detections]
    for threshold, kept in ((min(scores), scores), (2 * max(scores), [])):
        asked = infer(SKILL="detect", OBJECT="dot", THRESHOLD=threshold, **given)
        objects = output(await stub.ModelInfer(asked))["objects"]
        assert [box["score"] for box in objects] == kept
    assert [box["x_min"] for box in got["objects"]] == [each.box.x_min for each in found.detections]

    refs = "[[0.5, 0.5], [0, 0, 1, 0.25]]"
    got = output(
        await stub.ModelInfer(infer(SKILL="point", OBJECT="dot", SPATIAL_REFS=refs, **given))
    )
    points = await served.vision.Point(
        vision_service_pb2.PointRequest(
            image=image,
            point=vision_service_pb2.PointTask(
                spatial_refs=[
                    {"point": {"x": 0.5, "y": 0.5}},
                    {"box": {"x_min": 0, "y_min": 0, "x_max": 1, "y_max": 0.25}},
                ],
                **dot,
            ),
        )
    )
    assert got.keys() == {"points", "absence", *KEYS}
    assert got["absence"] == points.searches[0].absence
    assert got["points"] == [
        {"x": each.point.x, "y": each.point.y, "score": each.score} for each in points.detections
    ]
    assert got["metrics"]["input_tokens"] == points.usage.input_tokens

    got = output(await stub.ModelInfer(infer(SKILL="segment", OBJECT="dot", **given)))
    outlines = await served.vision.Segment(
        vision_service_pb2.SegmentRequest(image=image, segment=dot)
    )
    path = "".join(each.outline.svg_path for each in outlines.detections)
    assert got["path"] == path
    coarse = infer(SKILL="segment", OBJECT="dot", REFINE=False, ADAPTER="", **given)
    assert output(await stub.ModelInfer(coarse))["path"] == path

    got = output(await stub.ModelInfer(infer(SKILL="gaze", SPATIAL_REFS="[[0.25, 0.5]]", **given)))
    eye = {"eyes": [{"x": 0.25, "y": 0.5}], **settings}
    gazes = await served.vision.Gaze(vision_service_pb2.GazeRequest(image=image, gaze=eye))
    target = gazes.gazes[0].target
    assert got["gaze"] == {"x": target.x, "y": target.y, "score": gazes.gazes[0].score}
    asked = infer(SKILL="gaze", MAX_OBJECTS=2, ACCURATE=True, IMAGE=encoded)
    got = output(await stub.ModelInfer(asked))
    assert got["count"] == len(got["gazes"]) <= 2 and all("face" in each for each in got["gazes"])


async def test_reasoning_has_its_text_and_grounding(serve):
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    request = infer(SKILL="query", QUESTION="Why?", IMAGE=jpeg(), REASONING=True, **SETTINGS)
    assert output(await stub.ModelInfer(request))["reasoning"].keys() == {"text", "grounding"}


async def test_what_a_query_may_presuppose_and_be_told(serve):
    served = await serve(FakeRuntime(LIMITS, shows("dog")), max_absence=0.5)
    stub = GRPCInferenceServiceStub(served.channel)
    given = {"SKILL": "query", "QUESTION": "?", "IMAGE": jpeg(), "TEMPERATURE": 0.0}

    shown = output(await stub.ModelInfer(infer(PRESUPPOSES='["dog"]', **given)))
    assert shown["answer"] == "yes" and not shown["abstained"]
    missed = output(await stub.ModelInfer(infer(PRESUPPOSES='["dog", "cat"]', **given)))
    assert missed["answer"] == "" and missed["abstained"]
    assert [each["object"] for each in missed["absences"]] == ["dog", "cat"]
    answered = infer(PRESUPPOSES='["cat"]', MAX_ABSENCE=1.0, **given)
    assert output(await stub.ModelInfer(answered))["answer"] == "yes"

    plain = output(await stub.ModelInfer(infer(**given)))
    assert "absences" not in plain
    told = output(await stub.ModelInfer(infer(SYSTEM="Be brief.", **given)))
    assert told["metrics"]["input_tokens"] > plain["metrics"]["input_tokens"]

    # The fake runtime ends no reasoning by itself.
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    reasoned = infer(REASONING=True, MAX_REASONING_TOKENS=3, MAX_TOKENS=2, **given)
    assert 3 < output(await stub.ModelInfer(reasoned))["metrics"]["output_tokens"] <= 6


async def test_pixels_and_typed_contents(serve):
    """Pixels as UINT8 [height, width, 3]; inputs as contents in place of raw_input_contents."""
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    raw = raw_image()
    request = infer(SKILL="caption", **SETTINGS)
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[40, 60, 3])
    request.raw_input_contents.append(raw.raw.data)
    got = output(await stub.ModelInfer(request))
    task = {"sampling": {"temperature": 0}, "max_tokens": 12}
    response = await served.vision.Caption(
        vision_service_pb2.CaptionRequest(image=raw, caption=task)
    )
    (caption,) = response.captions
    assert got["caption"] == caption.text
    request.inputs[-1].shape[:] = [1, 40, 60, 3]
    assert output(await stub.ModelInfer(request))["caption"] == caption.text
    encoded = output(await stub.ModelInfer(infer(SKILL="caption", IMAGE=jpeg(), **SETTINGS)))
    for shape in ([len(jpeg())], [1, len(jpeg())]):
        request.inputs[-1].shape[:] = shape
        request.raw_input_contents[-1] = jpeg()
        assert output(await stub.ModelInfer(request))["caption"] == encoded["caption"]

    typed = pb.ModelInferRequest(model_name="moondream")
    for name, datatype, field, value in (
        ("SKILL", "BYTES", "bytes_contents", b"query"),
        ("QUESTION", "BYTES", "bytes_contents", b"What?"),
        ("TEMPERATURE", "FP64", "fp64_contents", 0.0),
        ("MAX_TOKENS", "INT64", "int64_contents", 3),
        ("REASONING", "BOOL", "bool_contents", False),
    ):
        tensor = typed.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        getattr(tensor.contents, field).append(value)
    assert output(await stub.ModelInfer(typed))["metrics"]["output_tokens"] <= 3


ASK = {"SKILL": "query", "QUESTION": "?"}
SEE = {**ASK, "IMAGE": jpeg()}
FIND = {"SKILL": "detect", "OBJECT": "x", "IMAGE": jpeg()}
GAZE = {"SKILL": "gaze", "IMAGE": jpeg()}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"SKILL": "smell"}, "SKILL: 'smell' is not one of query, caption, point, detect, segment, gaze"),
    ({"QUESTION": "What?"}, "SKILL: is required"),
    ({"SKILL": "query"}, "QUESTION: is required for the skill query"),
    ({"SKILL": "query", "QUESTION": ""}, "QUESTION: must not be empty"),
    ({"SKILL": "query", "QUESTION": b"\xff"}, "QUESTION: is not UTF-8: byte 0 is invalid"),
    ({"SKILL": "caption"}, "IMAGE: is required for the skill caption"),
    ({"SKILL": "caption", "IMAGE": b"GIF89a-not"}, "IMAGE: "),
    ({"SKILL": "caption", "IMAGE": jpeg(), "LENGTH": "huge"}, "LENGTH: must be short, normal or long"),
    (ASK | {"TEMPERATURE": 200.0}, "TEMPERATURE: 200.0 is not in [0, 100]"),
    (ASK | {"TEMPERATURE": float("nan")}, "TEMPERATURE: nan is not in"),
    (ASK | {"TEMPERATURE": "hot"}, "TEMPERATURE: has datatype 'BYTES'; it"),
    (ASK | {"TOP_P": 0.0}, "TOP_P: 0.0 is not in (0, 1]"),
    (ASK | {"MAX_TOKENS": 0}, "MAX_TOKENS: must be in [1, 2147483647], got 0"),
    (ASK | {"MAX_CROPS": 1}, "MAX_CROPS: needs IMAGE"),
    (ASK | {"REASONING": 1}, "REASONING: has datatype 'INT32'; it must be BOOL"),
    (ASK | {"SPATIAL_REFS": "[[2, 0.5]]"}, "SPATIAL_REFS[0]: 2.0 is not a number"),
    (ASK | {"SPATIAL_REFS": "[[1]]"}, "SPATIAL_REFS[0]: must have 2 or 4"),
    (ASK | {"SPATIAL_REFS": '["a"]'}, "SPATIAL_REFS[0]: must be a list of numbers"),
    (ASK | {"SPATIAL_REFS": "[" * 9999}, "SPATIAL_REFS: is not valid JSON"),
    (ASK | {"SPATIAL_REFS": "[" + "1" * 9999 + "]"}, "SPATIAL_REFS[0]: must be"),
    (ASK | {"STREAM": True}, "STREAM: ModelInfer has one response"),
    (ASK | {"PROMPT": "hi"}, "PROMPT: is not an input of the model; its inputs"),
    (ASK | {"ADAPTER": "a/b/c"}, "ADAPTER: "),
    (ASK | {"PRESUPPOSES": '["x"]'}, "IMAGE: is required"),
    (ASK | {"PRESUPPOSES": "dog"}, "PRESUPPOSES: is not valid JSON; it must be a list of names"),
    (ASK | {"PRESUPPOSES": "[3]"}, "PRESUPPOSES[0]: must be a string"),
    (ASK | {"MAX_REASONING_TOKENS": 0}, "MAX_REASONING_TOKENS: must be in [1, 2147483647], got 0"),
    (ASK | {"MAX_REASONING_TOKENS": 9}, "MAX_REASONING_TOKENS: "),
    (ASK | {"SYSTEM": b"\xff"}, "SYSTEM: is not UTF-8"),
    (ASK | {"SYSTEM": "x" * 40_000}, "SYSTEM: "),
    (SEE | {"MAX_CROPS": 5}, "MAX_CROPS: is 5; must be from 1 to 4"),
    (SEE | {"PRESUPPOSES": '["x", " "]'}, "PRESUPPOSES[1]: "),
    (SEE | {"PRESUPPOSES": '["\\ud800"]'}, "PRESUPPOSES[0]: "),
    (SEE | {"PRESUPPOSES": '["x"]', "MAX_ABSENCE": 1.5}, "MAX_ABSENCE: 1.5 is not"),
    (GAZE | {"SPATIAL_REFS": "[[0, 0], [1, 1]]"}, "SPATIAL_REFS: has 2 places; gaze takes an eye"),
    (GAZE | {"SPATIAL_REFS": "[[0, 2]]"}, "SPATIAL_REFS[0]: 2.0 is not"),
    (GAZE | {"SPATIAL_REFS": "[[0, 0]]", "ACCURATE": True}, "ACCURATE: "),
    (GAZE | {"MAX_OBJECTS": 257}, "MAX_OBJECTS: "),
    (FIND | {"MAX_OBJECTS": -4}, "MAX_OBJECTS: must be in [1,"),
    (FIND | {"MAX_CROPS": 0}, "MAX_CROPS: must be in [1,"),
    (FIND | {"MAX_CROPS": 5}, "MAX_CROPS: is 5; must be from 1 to 4"),
    (FIND | {"THRESHOLD": 1.5}, "THRESHOLD: 1.5 is not a number in [0, 1]"),
]  # fmt: skip


async def test_bad_input_is_refused_by_name(serve):
    stub = GRPCInferenceServiceStub((await serve()).channel)
    for inputs, words in BAD:
        told = await failure(stub.ModelInfer(infer(**inputs)))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT
        assert told.message.startswith(words), told.message


async def test_a_skill_that_the_model_lacks_is_a_fault_of_its_name(serve):
    served = await serve(family="moondream2")
    request = infer(SKILL="segment", OBJECT="x", IMAGE=jpeg())
    told = await failure(GRPCInferenceServiceStub(served.channel).ModelInfer(request))
    assert told.code is grpc.StatusCode.FAILED_PRECONDITION
    assert told.message.startswith("model_name: this model can't segment"), told.message


Change = Callable[[pb.ModelInferRequest], object]
TEXT = pb.InferParameter(string_param="soon")


def contents(position: int, data: bytes) -> Change:
    return lambda request: request.raw_input_contents.__setitem__(position, data)


def few_pixels(request: pb.ModelInferRequest) -> None:
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[2, 2, 3])
    request.raw_input_contents.append(b"\0" * 11)


BROKEN: list[tuple[Change, str]] = [
    (lambda r: r.inputs[2].shape.append(2), "MAX_TOKENS: must have one element, got shape [1, 2]"),
    (lambda r: r.inputs[1].shape.extend([2**62, 2**62]), "QUESTION: must have one element"),
    (lambda r: r.inputs[1].shape.append(-1), "QUESTION: has shape [1, -1]; sides must be 0 or more"),
    (lambda r: r.inputs[1].shape.extend([1] * 98), "QUESTION: has 99 dimensions; the limit is 8"),
    (contents(2, b"\x01"), "MAX_TOKENS: has 1 bytes; INT32 of shape [1] needs 4"),
    (contents(1, raw_form("BYTES", "What?")[:-1]), "QUESTION: has 8 bytes; BYTES of shape [1] needs 9"),
    (contents(1, b"\x05"), "QUESTION: has 1 bytes; BYTES of shape [1] needs at least 4"),
    (lambda r: r.raw_input_contents.pop(), "raw_input_contents: has 2 elements for 3 inputs"),
    (lambda r: setattr(r.inputs[1], "name", "SKILL"), "SKILL: is given twice"),
    (lambda r: r.inputs[1].contents.bytes_contents.append(b"hi"), "QUESTION: has contents beside raw_input_contents"),
    (lambda r: r.inputs[1].parameters["shared_memory_region"].MergeFrom(TEXT), "QUESTION: this server shares"),
    (lambda r: r.ClearField("raw_input_contents"), "SKILL: has 0 elements; BYTES of shape [1] needs 1"),
    (lambda r: r.outputs.add(name="LOGITS"), "outputs: 'LOGITS' is not TEXT_OUTPUT"),
    (lambda r: r.parameters["sequence_id"].MergeFrom(TEXT), "parameters.sequence_id: the model has no sequences"),
    (lambda r: r.parameters["timeout"].MergeFrom(TEXT), "parameters.timeout: must be at least 1 microsecond"),
    (few_pixels, "IMAGE: has 11 bytes; UINT8 of shape [2, 2, 3] needs 12"),
]  # fmt: skip


async def test_broken_tensors_are_refused(serve):
    stub = GRPCInferenceServiceStub((await serve()).channel)
    for change, words in BROKEN:
        request = infer(SKILL="query", QUESTION="What?", MAX_TOKENS=4)
        change(request)
        told = await failure(stub.ModelInfer(request))
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT
        assert told.message.startswith(words), told.message


async def test_names_and_versions(serve):
    served = await serve()
    stub = GRPCInferenceServiceStub(served.channel)
    request = infer(SKILL="query", QUESTION="What?", MAX_TOKENS=2)
    request.model_name, request.model_version = served.server.served.default.name, "1"
    assert (await stub.ModelInfer(request)).model_name == served.server.served.default.name
    request.model_version = "2"
    told = await failure(stub.ModelInfer(request))
    assert told.code is grpc.StatusCode.NOT_FOUND and told.message.startswith("model_version: '2'")
    request.model_name = "llava"
    told = await failure(stub.ModelInfer(request))
    assert told.code is grpc.StatusCode.NOT_FOUND and told.message.startswith("model_name: 'llava'")


async def test_what_is_known_about_server_and_model(serve):
    served = await serve(load=False)
    stub = GRPCInferenceServiceStub(served.channel)
    named = {"name": "moondream"}
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(**named))).ready
    (index,) = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
    assert (index.name, index.state) == ("moondream", "LOADING")
    assert not (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
    told = await failure(stub.ModelInfer(infer(SKILL="query", QUESTION="What?")))
    assert told.code is grpc.StatusCode.UNAVAILABLE

    await served.server.load()
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(**named, version="1"))).ready
    (index,) = (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
    assert index.state == "READY" and not index.reason
    config = (await stub.ModelConfig(pb.ModelConfigRequest(**named))).config
    assert config.model_transaction_policy.decoupled and config.max_batch_size == 0
    assert [each.name for each in config.input if not each.optional] == ["SKILL"]
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(**named))
    assert [each.name for each in metadata.outputs] == ["TEXT_OUTPUT"]
    assert {each.name: each.datatype for each in metadata.inputs}["MAX_TOKENS"] == "INT32"

    await stub.ModelInfer(infer(SKILL="query", QUESTION="What?", MAX_TOKENS=2))
    await failure(stub.ModelInfer(infer(SKILL="query")))
    await served.vision.Query(vision_service_pb2.QueryRequest(query={"question": "What?"}))
    (counted,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest(**named))).model_stats
    assert counted.inference_count == counted.inference_stats.success.count == 2
    # The request while the model loaded has failed, too.
    assert counted.inference_stats.fail.count == 2 and counted.inference_stats.fail.ns > 0
    assert counted.inference_stats.success.ns >= counted.inference_stats.compute_infer.ns > 0
    assert counted.last_inference > 1.6e12


async def test_what_makes_no_sense_here_says_why(serve):
    stub = GRPCInferenceServiceStub((await serve(load=False)).channel)
    memory = [f"{kind}SharedMemory" for kind in ("System", "Cuda")]
    methods = [each + what for each in memory for what in ("Status", "Register", "Unregister")]
    methods += ["RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"]
    for method in methods:
        told = await failure(getattr(stub, method)(getattr(pb, f"{method}Request")()))
        assert (told.code, told.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED"), method
        assert len(told.message) > 30
