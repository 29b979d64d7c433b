"""Features in place of an image: which requests take them, what is refused, by the SDK, the command line and gRPC."""

import json
from dataclasses import replace

import grpc
import numpy as np
import pytest

from kestrel_client import (
    AsyncKestrelClient,
    CaptionTask,
    DetectTask,
    ImageFeatures,
    ImageSize,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    QueryTask,
    RequestTooLargeError,
)
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.commands.requests.features import read_features, write_features
from kestrel_client.values.embeddings import EmbedResult, embed_result
from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import InvalidRequest
from kestrel_engine.preprocess.features import ImageFeatures as Given
from kestrel_engine.preprocess.features import check_features, features_of, prepared_features
from kestrel_engine.skills.base import SkillRequest
from kestrel_engine.types.adapter import Adapter
from kestrel_engine.types.requests import SamplingParams
from kestrel_grpc.monitoring.capture import _image_facts
from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.engine.fakes import fake_model
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS
from tests.service.statuses import failure

VISION = fake_model("moondream3").vision
SHAPE = VISION.grid**2, VISION.proj_out_dim
NUMBERS = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
SIZE = (300, 200)
GIVEN = ImageFeatures.from_array(NUMBERS, SIZE)


def embedded(numbers: np.ndarray = NUMBERS, adapter: str = "") -> EmbedResult:
    """What ``embed`` returns; the fake runtime's own embeddings have another shape."""
    response = pb.EmbedResponse()
    response.info.images.add().size.CopyFrom(common_pb2.ImageSize(width=300, height=200))
    response.embeddings.add(data=numbers.tobytes(), rows=len(numbers), dimensions=SHAPE[1], dtype=1)
    return embed_result(response, adapter)


def message(**changes) -> common_pb2.Image:
    fields = {
        "data": NUMBERS.tobytes(), "rows": SHAPE[0], "dimensions": SHAPE[1], "width": 300, "height": 200
    }  # fmt: skip
    return common_pb2.Image(features=common_pb2.ImageFeatures(**{**fields, **changes}))


@pytest.fixture
async def client(serve):
    served = await serve()
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        client.served = served
        yield client


async def test_all_skills_take_them_and_no_crop_is_encoded(client):
    half = ImageFeatures.from_array(NUMBERS.astype(np.float16), SIZE)
    for given in (embedded(), GIVEN, half):
        assert (await client.query(given, "What?", max_tokens=2)).image_size == SIZE
    for result in (
        await client.query(GIVEN, "What?", images=[half], max_tokens=2),
        await client.query(GIVEN, "What?", presupposes=["cat"], num_samples=2, max_tokens=2),
        await client.caption(GIVEN, max_tokens=2),
        await client.point(GIVEN, ["cat", "dog"], max_objects=1),
        await client.detect(GIVEN, "cat", max_objects=1),
        await client.segment(GIVEN, "cat", max_tokens=4),
        await client.run_skill("query", GIVEN, {"question": "What?"}, max_tokens=2),
        await client.analyze(GIVEN, [CaptionTask(max_tokens=2), DetectTask("cat", max_objects=1)]),
    ):
        assert tuple(result.image_size) == SIZE and result.image_id == ""
    async with client.stream_detect(GIVEN, "cat", max_objects=1) as stream:
        assert (await stream.result()).image_size == SIZE
    async for frame in client.frames([CaptionTask(max_tokens=2)], [GIVEN, half]):
        assert frame.dropped is None and frame.error is None
    assert sum(p.num_encoded for plan in client.served.runtime.plans for p in plan.encode) == 0
    count = await client.count_tokens(GIVEN, QueryTask("What?"))
    assert count.images[0].num_crops == 0 and count.images[0].size == SIZE
    used = await client.query(GIVEN, "What?", max_tokens=2)
    assert count.input_tokens == used.usage.input_tokens and used.usage.cached_tokens > 0


async def test_what_needs_pixels_says_so(serve):
    served = await serve(FakeRuntime(replace(LIMITS, refines=True)))
    vision, cat = served.vision, {"objects": ["cat"]}
    region = message()
    region.region.x_max = region.region.y_max = 0.5
    few, coloured = message(), message()
    few.max_crops, coloured.background = 1, "#ffffff"
    caption = pb.CaptionRequest
    cases = [
        (vision.Segment(pb.SegmentRequest(image=message(), segment=cat)), "segment.refinement"),
        (vision.Embed(pb.EmbedRequest(image=message())), "image"),
        (
            vision.Detect(
                pb.DetectRequest(image=message(), detect={**cat, "tiles": {"rows": 2, "columns": 2}})
            ),
            "detect.tiles",
        ),
        (
            vision.Gaze(
                pb.GazeRequest(image=message(), gaze={"faces": [region.region], "accurate": True})
            ),
            "gaze.accurate",
        ),
        (vision.Gaze(pb.GazeRequest(image=message(), gaze={"accurate": True})), "gaze.accurate"),
        (vision.Caption(caption(image=region)), "image.region"),
        (vision.Caption(caption(image=few)), "image.max_crops"),
        (vision.Caption(caption(image=coloured)), "image.background"),
        (served.images.PutImage(image_service_pb2.PutImageRequest(image=message())), "image.features"),
    ]  # fmt: skip
    for call, field in cases:
        error = await failure(call)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT and error.fields == [field], error
        assert "pixels" in error.message or "cannot be stored" in error.message, error
    coarse = pb.SegmentTask(objects=["cat"], refinement="REFINEMENT_NONE", max_tokens=4)
    await vision.Segment(pb.SegmentRequest(image=message(), segment=coarse))


async def test_what_is_refused(serve):
    served = await serve()
    rows, dimensions = SHAPE
    bad = NUMBERS.copy()
    bad[3, 5] = np.nan
    infinite = NUMBERS.astype(np.float16)
    infinite[2, 0] = np.inf
    large = NUMBERS.copy()
    large[7] = 1001.0
    empty = NUMBERS.astype(np.float16)
    empty[4] = 0
    cases = [
        ({"rows": rows + 1}, "rows", f"is {rows + 1}; this model has {rows} rows of {dimensions}"),
        ({"dimensions": 7}, "dimensions", "is 7; this model has"),
        ({"width": 0}, "width", "is 0; must be at least 1"),
        ({"height": -1}, "height", "is -1"),
        ({"data": NUMBERS.tobytes()[:-1]}, "data", f"are {2 * NUMBERS.size} in float16 or"),
        ({"data": NUMBERS.astype(np.float64).tobytes()}, "data", "in float32"),
        ({"data": b""}, "data", "has 0 bytes"),
        ({"data": bad.tobytes()}, "data", "row 3 has a number that is not finite"),
        ({"data": infinite.tobytes()}, "data", "row 2 has a number that is not finite"),
        ({"data": large.tobytes()}, "data", "row 7 has a root mean square of 1001; it must be above 0 and at"),
        ({"data": empty.tobytes()}, "data", "row 4 has a root mean square of 0; it must be above 0"),
        ({"adapter": "mine"}, "adapter", "was made with the adapter 'mine', and the request has no"),
        ({"adapter": "../x"}, "adapter", "name"),
    ]  # fmt: skip
    for changes, field, why in cases:
        request = pb.CaptionRequest(image=message(**changes))
        error = await failure(served.vision.Caption(request))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
        assert error.fields == [f"image.features.{field}"] and why in error.message, error
    request = pb.QueryRequest(images=[message(), message(rows=1)], query={"question": "?"})
    assert (await failure(served.vision.Query(request))).fields == ["images[1].features.rows"]
    request = pb.CaptionRequest(image=message(width=3000, height=100))
    assert "20:1" in (await failure(served.vision.Caption(request))).message
    assert served.engine.num_requests == 0 and not served.runtime.plans


async def test_a_message_is_bounded_as_any_other(serve):
    served = await serve(server_config={"max_message_bytes": NUMBERS.nbytes})
    error = await failure(served.vision.Caption(pb.CaptionRequest(image=message())))
    assert error.reason == "MESSAGE_TOO_LARGE"
    async with AsyncKestrelClient(served.server.addresses[0], max_message_bytes=1000) as client:
        with pytest.raises(RequestTooLargeError):
            await client.caption(GIVEN)


async def test_only_equal_features_in_the_same_namespace_share_a_prefix(client):
    async def cached(given: ImageFeatures, **options: str) -> int:
        return (await client.caption(given, max_tokens=1, **options)).usage.cached_tokens

    other = NUMBERS.copy()
    other[0, 0] += 1
    assert await cached(GIVEN) == 0 < await cached(GIVEN)
    assert await cached(ImageFeatures.from_array(other, SIZE)) == 0
    assert await cached(ImageFeatures.from_array(NUMBERS.astype(np.float16), SIZE)) == 0
    assert (
        await cached(GIVEN, cache_salt="another") == 0 < await cached(GIVEN, cache_salt="another")
    )


def test_what_the_sdk_refuses():
    for wrong, why in (
        (NUMBERS.astype(np.float64), "float64"),
        (NUMBERS[0], "of shape"),
        ([1.0], "list"),
    ):
        with pytest.raises(InvalidImageError, match=why):
            ImageFeatures.from_array(wrong, SIZE)
    with pytest.raises(InvalidImageError, match="5 bytes are not 2 x 3 numbers"):
        ImageFeatures(b"01234", 2, 3, ImageSize(*SIZE))
    pooled = embedded(NUMBERS[:1])
    with pytest.raises(InvalidImageError, match="pooling='none'"):
        _ = pooled.features
    assert embedded(adapter="mine").features.adapter == "mine"


async def test_the_sdk_names_what_it_cannot_send_or_draw(client):
    with pytest.raises(InvalidImageError, match="pooling='none'"):
        await client.caption(embedded(NUMBERS[:1]))
    result = await client.detect(GIVEN, "cat", max_objects=1)
    with pytest.raises(InvalidImageError, match="hold no pixels"):
        result.draw()
    with pytest.raises(InvalidImageError, match="features: "):
        await client.caption(replace(GIVEN, size=ImageSize(-(2**40), 1)))
    with pytest.raises((InvalidArgumentError, InvalidRequestError), match=r"image\.features"):
        await client.put_image(GIVEN)


def test_a_capture_without_images_has_a_digest_in_their_place():
    facts = _image_facts(message())
    assert facts["source"] == "features" and facts["bytes"] == NUMBERS.nbytes and facts["sha256"]


@pytest.mark.parametrize(
    "made_with, used, changes, why",
    [
        ("", None, "", ""),
        ("", "mine", "text.", ""),
        ("mine", "mine", "vision.blocks.", ""),
        ("mine", "mine@2", "vision.blocks.", ""),
        ("", "mine", "vision.blocks.", "made with no adapter, and the request has the adapter 'mine'"),
        ("", "mine", "vision.proj.", "made with no adapter"),
        ("mine", None, "", "made with the adapter 'mine', and the request has no adapter"),
        ("mine@1", "mine@2", "vision.blocks.", "made with the adapter 'mine@1'"),
        ("other", "mine", "text.", "made with the adapter 'other'"),
    ],
)  # fmt: skip
def test_the_adapter_is_that_of_the_request(made_with, used, changes, why):
    given = Given(NUMBERS.tobytes(), *SHAPE, *SIZE, made_with)
    assert features_of(given) is given and features_of(b"file") is None
    image = prepared_features(given, VISION, ImageLimits(), "")
    adapter = None if used is None else Adapter(used, "key", {f"{changes}x": None}, 0)
    skill = SkillRequest(skill="query", prompt_suffix=(), sampling=SamplingParams())
    if not why:
        check_features(image, skill, adapter, ("image",))
        return
    with pytest.raises(InvalidRequest, match=why) as refused:
        check_features(image, skill, adapter, ("images", 1))
    assert refused.value.path == ("images", 1, "features", "adapter")


async def test_the_commands(kestrel, tmp_path):
    file = tmp_path / "picture.npy"
    write_features(file, replace(GIVEN, adapter="mine@2"))
    assert read_features(str(file)) == replace(GIVEN, adapter="mine@2")
    write_features(file, GIVEN)
    record = np.load(file)
    np.testing.assert_array_equal(record["features"], NUMBERS)
    flags = ["--json", "--max-tokens", 2]
    for words in (
        ["query", "--features", file, "What?", *flags],
        ["query", file, "What?", *flags],
        ["caption", "--features", file, *flags],
        ["detect", "--features", file, "cat", "--max-objects", 1, "--json"],
        ["count", "--features", file, "--query", "What?", "--json"],
        ["analyze", "--features", file, "--caption", *flags],
    ):
        status, told, errors = await kestrel(*words)
        assert (status, errors) == (0, ""), words
        assert json.loads(told)
    text, short = tmp_path / "text.npy", tmp_path / "plain.npy"
    text.write_bytes(b"no features")
    np.save(short, NUMBERS)
    picture = tmp_path / "a.png"
    for words, why in (
        (
            ["query", "--features", text, "What?"],
            "is not a file that 'embed --save FILE.npy' wrote",
        ),
        (
            ["query", "--features", short, "What?"],
            "is not a file that 'embed --save FILE.npy' wrote",
        ),
        (["query", "--features", tmp_path / "none.npy", "What?"], "there is no image"),
        (["query", "--features", IMAGE, "What?"], "must be a file that 'embed --save FILE.npy'"),
        (["segment", "--features", file, "a", "--region", "0,0,1,1"], "--region: needs"),
        (["detect", "--features", file, "cat", "--save", picture], "holds no pixels here"),
        (["embed", file], "needs the image's pixels"),
        (["embed", file, file, "--save", tmp_path / "x.npy"], "holds one whole image"),
        (["embed", file, "--save", tmp_path / "x.jpg"], "must end in .npz or .npy"),
    ):
        status, _, errors = await kestrel(*words)
        assert status != 0 and why in errors, (words, errors)


async def test_a_gaze_takes_them_but_not_an_accurate_one(client):
    result = await client.gaze(GIVEN, (0.25, 0.5))
    assert result.gazes[0].target is not None and result.image_size == SIZE
    with pytest.raises(InvalidArgumentError, match=r"gaze\.accurate: needs the image's pixels"):
        await client.gaze(GIVEN, faces=(0, 0, 1, 1), accurate=True)
