"""Captured requests: what the files hold and never hold, their bounds, and their replay."""

import asyncio
import base64
import hashlib
import json
import logging
import stat

import grpc
import httpx2
import numpy as np
import pytest
import pyvips
from PIL import Image

from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import image_service_pb2 as image_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_grpc.cli.program import main
from kestrel_grpc.settings.debug import DebugConfig
from kestrel_grpc.settings.http import HttpConfig
from tests.kserve.conftest import infer
from tests.service.conftest import NO_END, EndlessRuntime, raw_image
from tests.service.images.test_images import id_of
from tests.service.security.test_admin import CONFIG, METADATA, Admin, query
from tests.service.statuses import failure
from tests.waiting import outlived, until

SECRET = "a-salt-of-the-caller"


def config(tmp_path, **bounds):
    return {**CONFIG, "debug": DebugConfig(capture_dir=str(tmp_path), **bounds)}


async def capturing(serve, tmp_path, runtime=None, images=False, **more):
    """A server that captures what fails, with ``images`` if that is said, and its administrator."""
    settings = {**config(tmp_path, capture_images=images), **more}
    served = await serve(runtime, server_config=settings)
    admin = Admin(served)
    await admin.StartCapture(images=images)
    return served, admin


async def fail(served, request=None, method="Query"):
    await until(lambda: not any(served.runtime.launched.values()))
    served.runtime.fail_next = RuntimeError("x")
    request = request or query(raw_image(), request_id="the-id", cache_salt=SECRET)
    call = getattr(served.vision, method)
    told = await failure(call(request, metadata=METADATA))
    assert told.code is grpc.StatusCode.INTERNAL


def read(tmp_path):
    return [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]


async def test_refused_without_a_folder_and_images_without_leave(serve, tmp_path):
    admin = Admin(await serve(server_config=CONFIG))
    told = await failure(admin.StartCapture())
    assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CAPTURE_UNAVAILABLE")
    admin = Admin(await serve(server_config=config(tmp_path)))
    told = await failure(admin.StartCapture(images=True))
    assert told.message == "the server was started without --capture-images"
    for number in (0, 101):
        assert (await failure(admin.StartCapture(requests=number))).fields == ["requests"]


async def test_nothing_is_written_unless_it_was_begun_and_only_what_failed(serve, tmp_path):
    served = await serve(server_config=config(tmp_path))
    admin = Admin(served)
    await fail(served)
    assert await files(admin) == []
    await admin.StartCapture(requests=2)
    await served.vision.Query(query(), metadata=METADATA)
    await failure(served.vision.Query(pb.QueryRequest(), metadata=METADATA))
    assert await files(admin) == []
    await admin.StartCapture(requests=2)
    for _ in range(3):
        await fail(served)
    written = await files(admin)
    assert len(written) == 2 and sorted(written) == sorted(p.name for p in tmp_path.iterdir())


async def files(admin):
    return list((await admin.StopCapture()).files)


async def test_what_a_file_holds_and_what_not(serve, tmp_path):
    served, admin = await capturing(serve, tmp_path)
    await fail(served)
    await files(admin)
    [path] = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET not in path.read_text() and "default" not in path.read_text()
    [told] = read(tmp_path)
    assert (told["method"], told["code"]) == ("kestrel.v1.VisionService/Query", "INTERNAL")
    assert (told["request_id"], told["model"]) == ("the-id", "fake")
    assert told["error"] == "RuntimeFailure" and "RuntimeFailure" in told["traceback"][-1]
    assert told["request"]["query"]["question"] == "what?"
    assert told["request"]["images"] == [{}]
    assert [each["bytes"] for each in told["images_left_out"]] == [60 * 40 * 3]


async def test_requests_by_kserve_and_http_are_captured_as_what_they_became(serve, tmp_path):
    http = HttpConfig(http_listen=("127.0.0.1:0",))
    served, admin = await capturing(serve, tmp_path, http=http)
    kserve = GRPCInferenceServiceStub(served.channel)
    for request in (infer(SKILL="query", QUESTION="what?"), infer(SKILL="none")):
        served.runtime.fail_next = RuntimeError("x")
        await failure(kserve.ModelInfer(request, metadata=METADATA))
    served.runtime.fail_next = RuntimeError("x")
    async with httpx2.AsyncClient(headers=dict(METADATA)) as client:
        url = f"http://{served.server.http_addresses[0]}/v1/query"
        response = await client.post(url, json={"question": "why?", "stream": True})
    assert "computation_failed" in response.text
    await files(admin)
    captured = read(tmp_path)
    asked = {told["method"]: told["request"]["query"]["question"] for told in captured}
    service = "kestrel.v1.VisionService"
    assert asked == {f"{service}/Query": "what?", f"{service}/StreamQuery": "why?"}


async def test_a_image_by_id_is_there_though_it_was_deleted_meanwhile(serve, tmp_path):
    served = await serve(EndlessRuntime(), server_config=config(tmp_path, capture_images=True))
    admin = Admin(served)
    kept = await served.vision.Query(query(raw_image(), max_tokens=2), metadata=METADATA)
    await admin.StartCapture(images=True)
    by_id = common_pb2.Image(image_id=id_of(kept))
    image_id = image_pb2.DeleteImageRequest(image_id=id_of(kept))
    call = served.vision.Query(query(by_id, max_tokens=NO_END), metadata=METADATA)
    await until(lambda: served.engine.num_requests)
    assert (await served.images.DeleteImage(image_id, metadata=METADATA)).existed
    served.runtime.fail_next = RuntimeError("x")
    assert (await failure(call)).code is grpc.StatusCode.INTERNAL
    await until(lambda: not served.server.guard.admission.calls)
    await files(admin)
    [told] = read(tmp_path)
    assert told["request"]["images"][0]["raw"]["width"] == 60 and told["images_left_out"] == []


@pytest.mark.parametrize("task", ["analyze", "run"])
async def test_every_method_that_takes_an_id_gives_its_image(serve, tmp_path, task, replay):
    served = await serve(server_config=config(tmp_path, capture_images=True))
    admin = Admin(served)
    kept = await served.vision.Query(query(raw_image()), metadata=METADATA)
    by_id = common_pb2.Image(image_id=id_of(kept))
    await admin.StartCapture(images=True)
    if task == "run":
        served.runtime.fail_next = RuntimeError("x")
        request = pb.RunSkillRequest(image=by_id, skill=pb.SkillTask(name="caption"))
        call = served.vision.RunSkill(request, metadata=METADATA)
    else:
        request = pb.AnalyzeRequest(image=by_id, tasks=[{"caption": {}}])
        served.server.served.engine().prepare_image = broken_once(served)
        call = served.vision.Analyze(request, metadata=METADATA)
    assert (await failure(call)).code is grpc.StatusCode.INTERNAL
    [name] = await files(admin)
    [told] = read(tmp_path)
    assert len(told["request"]["image"]["raw"]["data"]) == 60 * 40 * 3 * 4 // 3
    served.server.images.clear()
    status, lines = await replay(served, tmp_path / name)
    assert (status, lines[-1]) == (0, "OK")


async def test_without_leave_a_image_by_id_is_left_out_with_what_tells_it(serve, tmp_path):
    served = await serve(server_config=config(tmp_path))
    admin = Admin(served)
    kept = await served.vision.Query(query(raw_image()), metadata=METADATA)
    await admin.StartCapture()
    await fail(served, query(common_pb2.Image(image_id=id_of(kept))))
    await files(admin)
    [told] = read(tmp_path)
    sha = hashlib.sha256(raw_image().raw.data).hexdigest()
    assert told["images_left_out"] == [{"source": "image_id", "bytes": 7200, "sha256": sha}]
    assert told["request"]["images"] == [{}]


def broken_once(served):
    """In place of the engine's ``prepare_image``: fails once."""
    engine = served.server.served.engine()
    prepare = engine.prepare_image

    async def broken(*args, **options):
        engine.prepare_image = prepare
        raise RuntimeError("a bug")

    return broken


def png(width=60, height=40):
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    return pyvips.Image.new_from_array(pixels).pngsave_buffer()


def upload_of(data, info=None):
    """Messages of an upload in pieces."""
    yield image_pb2.UploadImageRequest(info=info or image_pb2.UploadInfo(size_bytes=len(data)))
    for start in range(0, len(data), 1000):
        yield image_pb2.UploadImageRequest(chunk=data[start : start + 1000])


async def test_an_upload_that_fails_is_captured_and_done_again(serve, tmp_path, replay):
    served, admin = await capturing(serve, tmp_path, images=True)
    served.server.served.engine().prepare_image = broken_once(served)
    data = png()
    info = image_pb2.UploadInfo(size_bytes=len(data), sha256=hashlib.sha256(data).digest())
    call = served.images.UploadImage(upload_of(data, info), metadata=METADATA)
    assert (await failure(call)).code is grpc.StatusCode.INTERNAL
    [name] = await files(admin)
    [told] = read(tmp_path)
    assert told["method"] == "kestrel.v1.ImageService/UploadImage"
    begun, chunk = told["request"]
    assert begun["info"]["size_bytes"] == str(len(data))
    assert base64.b64decode(chunk["chunk"]) == data and told["error"] == "RuntimeError"
    status, lines = await replay(served, tmp_path / name)
    assert (status, lines[-1]) == (0, "OK") and len(served.server.images) == 1


async def test_an_upload_without_its_image_asks_for_one(serve, tmp_path, replay, capsys):
    served, admin = await capturing(serve, tmp_path)
    served.server.served.engine().prepare_image = broken_once(served)
    data = png()
    assert await failure(served.images.UploadImage(upload_of(data), metadata=METADATA))
    [name] = await files(admin)
    [told] = read(tmp_path)
    sha = hashlib.sha256(data).hexdigest()
    assert told["images_left_out"] == [{"source": "upload", "bytes": len(data), "sha256": sha}]
    assert [list(message) for message in told["request"]] == [["info"]]
    other = tmp_path / "other.png"
    other.write_bytes(png(width=9))
    status, lines = await replay(served, tmp_path / name, "--image", str(other))
    assert (status, lines[-1]) == (0, "OK")
    assert (await replay(served, tmp_path / name))[0] == 1


async def test_an_upload_that_stalls_is_captured_with_what_came(serve, tmp_path):
    served = await serve(server_config=config(tmp_path, capture_images=True))
    admin, stalled = Admin(served), asyncio.Event()

    async def stalls():
        for message in list(upload_of(b"x" * 5000))[:3]:
            yield message
        await stalled.wait()

    async def captured(timeout):
        await admin.StartCapture(images=True)
        call = served.images.UploadImage(stalls(), metadata=METADATA, timeout=timeout)
        assert (await failure(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not served.server.guard.admission.calls)
        return [json.loads((tmp_path / name).read_text()) for name in await files(admin)]

    def came(captured):
        """The bytes of the upload that the only captured call has."""
        return sum(
            len(base64.b64decode(m["chunk"])) for [c] in [captured] for m in c["request"][1:]
        )

    await outlived(captured, lambda told: told and came(told) == 2000, 0.5)
    stalled.set()


@pytest.mark.parametrize("bounds", [{"capture_max_files": 1}, {"capture_max_bytes": 4500}])
async def test_the_folder_has_bounds(serve, tmp_path, bounds):
    served = await serve(server_config=config(tmp_path, **bounds))
    admin = Admin(served)
    await admin.StartCapture()
    for _ in range(2):
        await fail(served)
    stopped = await admin.StopCapture()
    assert (len(stopped.files), stopped.lost) == (1, 1)
    assert len(list(tmp_path.iterdir())) == 1


async def test_a_full_disk_costs_the_file_only(serve, tmp_path, monkeypatch, caplog):
    served, admin = await capturing(serve, tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kestrel_grpc.monitoring.capture.Path.rename", full)
    with caplog.at_level(logging.ERROR):
        await fail(served)
        assert (await admin.StopCapture()).lost == 1
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert (await served.vision.Query(query(), metadata=METADATA)).answers[0].text


@pytest.fixture
def replay(monkeypatch, capsys):
    """Does a captured request again: (exit status, lines of standard output)."""
    monkeypatch.setenv("KESTREL_TOKEN", METADATA[0][1].removeprefix("Bearer "))

    async def again(served, path, *flags):
        server = ("--server", served.server.addresses[0])
        status = await asyncio.to_thread(main, ["replay", str(path), *server, *flags])
        return status, capsys.readouterr().out.splitlines()

    return again


async def test_a_replay_does_it_again(serve, tmp_path, replay):
    served, admin = await capturing(serve, tmp_path, images=True)
    await fail(served, query(raw_image()), "StreamQuery")
    [name] = await files(admin)
    status, told = await replay(served, tmp_path / name)
    assert status == 0
    assert told[0] == "kestrel.v1.VisionService/StreamQuery, captured with INTERNAL"
    assert json.loads(told[-2])["final"]["usage"]["output_tokens"] == 2 and told[-1] == "OK"
    served.runtime.fail_next = RuntimeError("x")
    status, told = await replay(served, tmp_path / name)
    assert status == 1 and told[-1].startswith("failed again: ")


async def test_a_request_that_was_capped_is_done_again_as_it_was_run(serve, tmp_path, replay):
    """By HTTP, max_tokens above the room is the room; by gRPC it is an error."""
    http = HttpConfig(http_listen=("127.0.0.1:0",))
    served, admin = await capturing(serve, tmp_path, http=http)
    served.runtime.fail_next = RuntimeError("x")
    async with httpx2.AsyncClient(headers=dict(METADATA)) as client:
        url = f"http://{served.server.http_addresses[0]}/api/generate"
        body = {"prompt": "why?", "stream": False, "options": {"num_predict": 100_000}}
        assert (await client.post(url, json=body)).status_code == 500
    [name] = await files(admin)
    status, told = await replay(served, tmp_path / name)
    assert (status, told[-1]) == (0, "OK"), told


async def test_several_images_are_captured_or_left_out_and_given_again(serve, tmp_path, replay):
    served = await serve(server_config=config(tmp_path, capture_images=True))
    admin = Admin(served)
    kept = await served.vision.Query(query(raw_image(), max_tokens=2), metadata=METADATA)
    by_id = common_pb2.Image(image_id=id_of(kept))
    request = query(raw_image(30, 30))
    request.query.history.add(question="a", answer="b", num_images=2)
    request.images.extend([by_id, raw_image(20, 20)])
    await admin.StartCapture(images=True)
    await fail(served, request)
    [name] = await files(admin)
    [told] = read(tmp_path)
    sizes = [image["raw"]["width"] for image in told["request"]["images"]]
    assert sizes == [30, 60, 20] and told["images_left_out"] == []
    (tmp_path / name).unlink()
    await admin.StartCapture()
    await fail(served, request)
    [name] = await files(admin)
    [told] = read(tmp_path)
    assert [each["bytes"] for each in told["images_left_out"]] == [2700, 7200, 1200]
    assert told["request"]["images"] == [{}, {}, {}]
    images = []
    for side in (30, 40, 20):
        images += ["--image", str(tmp_path / f"{side}.png")]
        Image.new("RGB", (side, side)).save(images[-1])
    status, lines = await replay(served, tmp_path / name, *images)
    assert status == 0
    assert [i["size"]["width"] for i in json.loads(lines[-2])["info"]["images"]] == [30, 40, 20]
    status, lines = await replay(served, tmp_path / name, *images[:2])
    assert status == 1 and not lines


def test_a_replay_asks_for_the_image_that_was_left_out(tmp_path, capsys):
    path = tmp_path / "a.capture.json"
    told = {
        "kestrel_capture": 1,
        "method": "kestrel.v1.VisionService/Query",
        "request": {"query": {"question": "what?"}, "images": [{}]},
        "code": "INTERNAL",
        "model": None,
        "images_left_out": [{"source": "encoded", "bytes": 3, "sha256": "abc"}],
    }
    path.write_text(json.dumps(told))
    assert main(["replay", str(path)]) == 1
    words = "the capture does not hold the image, of 3 bytes, SHA-256 abc: give it with --image"
    assert words in capsys.readouterr().err
    told["images_left_out"].append({"source": "image_id"})
    path.write_text(json.dumps(told))
    assert main(["replay", str(path)]) == 1
    assert "does not hold image 1 of 2, of 3 bytes" in capsys.readouterr().err
    upload = {"method": "kestrel.v1.ImageService/UploadImage", "request": 5}
    wrong = (
        {"kestrel_capture": 2}, {"method": ["a"]}, {"method": "x/y"}, upload, {"request": "no"},
        {"request": {"nofield": 1}}, {"images_left_out": "bytes"},
    )  # fmt: skip
    for broken in ("{}", "no", "[]", "[" * 10**5, *(json.dumps({**told, **bad}) for bad in wrong)):
        path.write_text(broken)
        assert main(["replay", str(path)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert "is not a captured request: " in line


async def test_a_frame_is_captured_with_the_message_that_opened_its_stream(serve, tmp_path, replay):
    """The image only if that is allowed, as for other requests, and never the salt."""
    served, admin = await capturing(serve, tmp_path)
    tasks = [{"caption": {"max_tokens": 2}}]
    frames = [
        pb.StreamFramesRequest(config={"tasks": tasks, "options": {"cache_salt": SECRET}}),
        pb.StreamFramesRequest(frame=pb.Frame(frame_id=5, image=raw_image())),
    ]
    served.server.served.engine().prepare_image = broken_once(served)
    responses = [r async for r in served.vision.StreamFrames(frames, metadata=METADATA)]
    assert [r.error.code for r in responses] == [grpc.StatusCode.INTERNAL.value[0]]
    [name] = await files(admin)
    [told] = read(tmp_path)
    opening, frame = told["request"]
    assert opening["config"]["tasks"] == tasks
    assert frame == {"frame": {"frame_id": "5", "image": {}}}
    assert SECRET not in json.dumps(told) and told["images_left_out"][0]["source"] == "raw"
    path = tmp_path / "image.png"
    Image.new("RGB", (60, 40)).save(path)
    status, lines = await replay(served, tmp_path / name, "--image", str(path))
    assert status == 0 and lines[-1] == "OK"
    assert json.loads(lines[-2])["frame_id"] == "5" and "results" in json.loads(lines[-2])
