"""The backend for Label Studio: real requests to it, before a server with the bundled model."""

import asyncio
import base64
import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from clients.tools.label_studio_kestrel import app, heads
from clients.tools.label_studio_kestrel.__main__ import main, opened, parser
from clients.tools.label_studio_kestrel.images import TaskImages, origin
from clients.tools.label_studio_kestrel.labelling import RequestRefused, read_controls
from clients.tools.label_studio_kestrel.predictions import Predictor
from kestrel_client import KestrelClient
from tests.clock import MovedClock
from tests.code_blocks import ROOT
from tests.forking.process import ForkedProcess
from tests.ports import free_port
from tests.service.command_line import environment
from tests.waiting import until

IMAGE = ROOT / "clients/python/kestrel_client/commands/demo.jpg"
DATA = IMAGE.read_bytes()
URL = "data:image/jpeg;base64," + base64.b64encode(DATA).decode()
TOKEN = "t" * 32
BASIC = "Basic " + base64.b64encode(f"a:{TOKEN}".encode()).decode()
JSON = {"content-type": "application/json"}
CONFIG = """<View>
  <Image name="img" value="$image"/>
  <RectangleLabels name="boxes" toName="img"><Label value="Moon" predicted_values="green crescent"/></RectangleLabels>
  <KeyPointLabels name="points" toName="img"><Label value="green crescent"/></KeyPointLabels>
  <PolygonLabels name="outlines" toName="img"><Label value="green crescent"/></PolygonLabels>
</View>"""


@asynccontextmanager
async def bridge(*flags: str, token: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
    port = free_port()
    args = parser().parse_args(["--listen", f"127.0.0.1:{port}", *flags])
    async with opened(args, token) as server:
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client
        server.should_exit = server.force_exit = True
        await serving


def asked(image: object = URL, config: str = CONFIG) -> dict[str, Any]:
    return {"tasks": [{"id": 7, "data": {"image": image}}], "label_config": config}


async def test_a_task_gets_boxes_points_and_outlines(server: str):
    async with bridge("--server", server) as client:
        health = await client.get("/health")
        assert health.json()["status"] == "UP"
        setup = await client.post("/setup", json={"project": "1.2", "schema": CONFIG})
        version = setup.json()["model_version"]
        assert re.fullmatch(r"kestrel-tiny@[0-9a-f]{8}", version)
        assert (await client.get("/versions")).json() == {"versions": [version]}
        answered = await client.post("/predict", json=asked())
        two = {**asked(), "tasks": asked()["tasks"] * 2}
        twice = await client.post("/predict", json=two)
    assert answered.status_code == 200, answered.text
    (prediction,) = answered.json()["results"]
    assert twice.json()["results"] == [prediction] * 2
    assert prediction["model_version"] == version and 0.5 < prediction["score"] <= 1
    regions: dict[str, list[dict[str, Any]]] = {}
    for region in prediction["result"]:
        regions.setdefault(region["type"], []).append(region)
        assert region["to_name"] == "img" and 0 < region["score"] <= 1
    assert len({region["id"] for region in prediction["result"]}) == len(prediction["result"])
    with KestrelClient(server, timeout=60) as direct:
        boxes = direct.detect(DATA, "green crescent")
        points = direct.point(DATA, "green crescent")
        outline = direct.segment(DATA, "green crescent")
    size = boxes.image_size
    assert size is not None and len(boxes) == len(points) == 2
    for region, box in zip(regions["rectanglelabels"], boxes, strict=True):
        value = region["value"]
        assert (region["original_width"], region["original_height"]) == size
        assert region["from_name"] == "boxes" and value["rectanglelabels"] == ["Moon"]
        assert value["x"] == pytest.approx(100 * box.x_min)
        assert value["y"] + value["height"] == pytest.approx(100 * box.y_max)
        assert value["x"] + value["width"] == pytest.approx(100 * box.x_max)
        assert region["score"] == pytest.approx(box.score)
    for region, point in zip(regions["keypointlabels"], points, strict=True):
        value = region["value"]
        assert (value["x"], value["y"]) == pytest.approx((100 * point.x, 100 * point.y))
        assert value["keypointlabels"] == ["green crescent"]
    (polygon,) = regions["polygonlabels"]
    assert polygon["value"]["polygonlabels"] == ["green crescent"] and outline.box is not None
    across = [corner[0] for corner in polygon["value"]["points"]]
    assert len(across) > 2 and polygon["value"]["closed"]
    assert min(across) == pytest.approx(100 * outline.box.x_min, abs=2)
    assert max(across) == pytest.approx(100 * outline.box.x_max, abs=2)


async def test_several_labels_may_stand_for_one_object(server: str):
    labels = "".join(f'<Label value="{i}" predicted_values="green crescent"/>' for i in range(33))
    config = f"""<View><Image name="i" value="$image"/>
      <KeyPointLabels name="p" toName="i">{labels}</KeyPointLabels></View>"""
    async with bridge("--server", server) as client:
        answered = await client.post("/predict", json=asked(config=config))
    assert answered.status_code == 200, answered.text
    (prediction,) = answered.json()["results"]
    found = [region["value"]["keypointlabels"][0] for region in prediction["result"]]
    assert found == [str(i) for i in range(33) for _ in range(2)]


DEEP = "<a>" * 9_000 + "</a>" * 9_000
LAUGHS = '<!DOCTYPE a [<!ENTITY b "b"><!ENTITY c "&b;&b;">]><View>&c;</View>'
BAD: dict[str, tuple[object, str]] = {
    "no object": ([], "JSON object"),
    "no tasks": ({"label_config": CONFIG}, "tasks: must be a list"),
    "empty": ({**asked(), "tasks": []}, "tasks: must be a list"),
    "many": ({**asked(), "tasks": [1] * 257}, "tasks: are 257, the limit is 256"),
    "no data": ({**asked(), "tasks": [{"id": 1}]}, "tasks[0].data: must be an object"),
    "no image": (asked(None), "tasks[0].data.image: must be the address"),
    "data url": (asked("data:image/png,abc"), "must be a data URL like data:"),
    "base64": (asked("data:image/png;base64,*"), "is not valid base64"),
    "no picture": (asked("data:image/png;base64,aGVsbG8="), "image"),
    "file": (asked("file:///etc/passwd"), "not an address like"),
    "path": (asked("/data/upload/1/a.jpg"), "--label-studio URL"),
    "bucket": (asked("s3://bucket/a.jpg"), "pre-sign URLs"),
    "host": (asked("http://169.254.169.254/latest"), "--fetch-allow"),
    "loopback": (asked("http://localhost:1/a.jpg"), "--fetch-allow"),
    "user": (asked("http://a@127.0.0.1/a.jpg"), "not an address like"),
    "no config": ({"tasks": asked()["tasks"]}, "label_config: must be"),
    "no xml": (asked(config="<View>"), "is not XML"),
    "doctype": (asked(config=LAUGHS), "document type"),
    "deep": (asked(config=DEEP), "has no RectangleLabels"),
    "no control": (asked(config="<View/>"), "has no RectangleLabels"),
    "no name": (asked(config='<RectangleLabels toName="b"/>'), "has no name"),
    "constant": (asked(config='<Image name="a" value="b"/>'), "has no RectangleLabels"),
    "surrogate": (asked(config="<View a='\ud800'/>"), ""),
}


async def test_bad_requests_are_refused_with_a_reason(server: str):
    async with bridge("--server", server) as client:
        for name, (body, part) in BAD.items():
            if name == "surrogate":
                text = '{"label_config": "<View a=\'\\ud800\'/>", "tasks": [1]}'
                response = await client.post("/predict", content=text, headers=JSON)
            else:
                response = await client.post("/predict", json=body)
            assert response.status_code == 400, (name, response.text)
            assert part in response.json()["error"], (name, response.text)
        deep = await client.post("/predict", content=b"[" * 100_000, headers=JSON)
        assert deep.status_code == 400 and "not JSON" in deep.text
        schema = await client.post("/setup", json={"schema": LAUGHS})
        assert schema.status_code == 400
        assert (await client.get("/predict")).status_code == 405
        assert (await client.get("/elsewhere")).status_code == 404
        one_bad = {**asked(), "tasks": [*asked()["tasks"], {"data": {"image": "x"}}]}
        response = await client.post("/predict", json=one_bad)
        assert response.status_code == 400 and "tasks[1].data.image" in response.text


async def test_bodies_are_bounded(server: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(app, "BODY_S", 0.2)
    async with bridge("--server", server) as client:
        response = await client.post("/predict", content=b" " * 1001, headers=JSON)
        assert response.status_code == 400 and "limit of 1000" in response.text
        head = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += b"content-length: 9\r\n\r\n{"
        for waits in (True, False):  # A caller that stays silent, and one that goes away.
            port = client.base_url.port
            reader, writer = await asyncio.open_connection(client.base_url.host, port)
            writer.write(head)
            if waits:
                answered = await reader.read()
                assert answered.startswith(b"HTTP/1.1 400") and b"within 0.2 s" in answered
            writer.close()
            await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"])
async def test_slow_heads_hold_no_place(server: str, moved_clock: MovedClock, before: bytes):
    """Neither at the beginning of a connection nor after an answer."""
    async with bridge("--server", server) as client:
        url = client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(before)
        if before:
            assert b"200 OK" in await reader.readuntil(b"}")
        writer.write(b"GET /health HTTP/1.1\r\nx: ")
        ended = asyncio.ensure_future(reader.read())
        await until(lambda: moved_clock.advance(heads.HEAD_S) or ended.done())
        assert isinstance(ended.exception(), ConnectionResetError) or not ended.result()
        writer.close()
        assert (await client.get("/health")).status_code == 200


async def test_what_a_caller_no_longer_waits_for_is_not_computed(monkeypatch: pytest.MonkeyPatch):
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def never(*_: object) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(Predictor, "predict", never)
    monkeypatch.setattr(app, "_MOST_READ", 1)
    async with bridge("--server", "127.0.0.1:1", "--timeout", "5") as client:
        asking = asyncio.create_task(client.post("/predict", json=asked()))
        await asyncio.wait_for(began.wait(), 60)
        asking.cancel()
        await asyncio.wait_for(cancelled.wait(), 60)
        response = await client.post("/setup", json={"schema": CONFIG})  # Its place is free.
        assert response.status_code == 503


async def test_without_a_token_only_this_machine_is_named():
    """A page of a browser can't reach the bridge by a name of its own that leads to loopback."""
    async with bridge("--server", "127.0.0.1:1", "--timeout", "5") as client:
        for host, text in {
            "evil.example": "Invalid host",
            "evil.example:9090": "Invalid host",
            "127.0.0.1.evil.example": "Invalid host",
            "10.0.0.1": "Invalid host",
            "localhost:9090": "label_config",
            "127.0.0.1": "label_config",
        }.items():
            response = await client.post("/setup", content=b"{}", headers={**JSON, "host": host})
            assert response.status_code == 400 and text in response.text, host
        response = await client.post(
            "/setup", content=b"{}", headers={"content-type": "text/plain"}
        )
        assert response.status_code == 415, "a page of another site may send it"
    async with bridge("--server", "127.0.0.1:1", token=TOKEN) as client:
        headers = {**JSON, "host": "bridge.example.org", "authorization": BASIC}
        response = await client.post("/setup", content=b"{}", headers=headers)
        assert response.status_code == 400


async def test_a_token_may_have_any_letters():
    async with bridge("--server", "127.0.0.1:1", "--timeout", "5", token="gehéim") as client:
        given = b"Basic " + base64.b64encode("a:gehéim".encode())
        headers = {**JSON, "authorization": given}
        response = await client.post("/setup", content=b"{}", headers=headers)
        assert response.status_code == 400 and "label_config" in response.text


async def test_callers_need_the_token_and_no_server_is_said():
    flags = ("--server", "127.0.0.1:1", "--timeout", "5")
    async with bridge(*flags, token=TOKEN) as client:
        assert (await client.get("/")).status_code == 200
        body = {"schema": CONFIG}
        basic = {"auth": httpx2.BasicAuth("anyone", TOKEN)}
        response = await client.post("/setup", json=body, **basic)
        assert response.status_code == 503 and "no server answers" in response.text
        wrong: list[dict[str, Any]] = [
            {},
            {"headers": {"authorization": f"Bearer {TOKEN}"}},
            {"headers": {"authorization": TOKEN}},
            {"headers": {"authorization": "Basic ***"}},
            {"headers": {"authorization": b"Bearer \xff\xfe"}},
            {"headers": {"authorization": b"Basic \xff\xfe"}},
            {"auth": httpx2.BasicAuth(TOKEN, "")},
        ]
        for credentials in wrong:
            response = await client.post("/setup", json=body, **credentials)
            assert response.status_code == 401, credentials
            assert response.headers["www-authenticate"].startswith("Basic")
    async with bridge(*flags) as client:
        response = await client.post("/predict", json=asked())
        assert response.status_code == 503
        refused = await client.post("/setup", json={"schema": 1})
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--listen", "0.0.0.0:9090"], "KESTREL_BRIDGE_TOKEN"),
        (["--listen", "9090"], "must be HOST:PORT"),
        (["--fetch-allow", "127.0.0.1"], "images.example.org"),
        (["--allow-data-urls"], "data URLs are always taken"),
        *((["--label-studio", url], "--label-studio") for url in ("h:8080", "http://u@h", "http://h/p")),
    ],
)  # fmt: skip
def test_flags_are_checked(flags: list[str], part: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2 and part in capsys.readouterr().err


def test_the_command_says_where_it_listens_and_ends():
    command = [sys.executable, "-m", "label_studio_kestrel", "--listen", "127.0.0.1:0"]
    process = ForkedProcess(
        command, cwd=ROOT / "clients/tools", env=environment(), stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
        assert httpx2.get(f"{address}/health", timeout=60).json()["status"] == "UP"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM)


Answers = dict[str, bytes]


@asynccontextmanager
async def label_studio(answers: Answers, heads: list[bytes]) -> AsyncIterator[str]:
    """A web server that answers paths, and keeps the heads of requests."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head)
            writer.write(answers[head.split(b" ")[1].decode()])
            await writer.drain()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listening.close()


def answer(body: bytes, status: str = "200 OK", header: str = "x: y") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{header}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_images_of_label_studio_are_fetched_with_its_token_only_from_it():
    heads: list[bytes] = []
    elsewhere: list[bytes] = []
    answers = {"/data/upload/1/a.jpg": answer(DATA)}
    async with label_studio({"/a": answer(DATA)}, elsewhere) as other:
        answers["/tasks/1/resolve/?f=x"] = answer(b"", "303 See Other", f"Location: {other}/a")
        async with label_studio(answers, heads) as home, contextlib.AsyncExitStack() as stack:
            images = await stack.enter_async_context(TaskImages([], origin(home), "secret"))
            for path in ("/data/upload/1/a.jpg", f"{home}/data/upload/1/a.jpg"):
                assert await images.read(path, "image") == DATA
            assert all(b"authorization: Token secret\r\n" in head for head in heads)
            assert len(heads) == 2
            for path, part in {
                "/api/projects": "Label Studio's images",
                "/data/../api/projects": "Label Studio's images",
                "/data/%2e%2e/api/projects": "Label Studio's images",
                "/data/%252e%252e/api": "Label Studio's images",
                "/data\\..\\api": "Label Studio's images",
                "/data/%3f/../../api": "Label Studio's images",
                "/data/%23/../../api": "Label Studio's images",
                "//example.org/data/a.jpg": "Label Studio's images",
                f"{home}/api/projects": "Label Studio's images",
                f"{home}@example.org/a.jpg": "not an address",
                f"{other}/a": "--fetch-allow",
            }.items():
                with pytest.raises(RequestRefused, match=part):
                    await images.read(path, "image")
            assert len(heads) == 2
            with pytest.raises(RequestRefused, match="--fetch-allow"):
                await images.read("/tasks/1/resolve/?f=x", "image")
    assert elsewhere == []


async def test_an_allowed_host_must_have_a_public_address():
    heads: list[bytes] = []
    async with label_studio({"/a": answer(DATA)}, heads) as home:
        host = home.removeprefix("http://").replace("127.0.0.1", "localhost")
        async with TaskImages([host], None, None) as images:
            with pytest.raises(RequestRefused, match=r"image: .* not public"):
                await images.read(f"http://{host}/a", "image")
    assert heads == []


def test_controls_of_a_configuration():
    boxes, points, outlines = read_controls(CONFIG)
    assert (boxes.kind, boxes.from_name, boxes.to_name) == ("rectanglelabels", "boxes", "img")
    assert boxes.labels == [("green crescent", "Moon")] and points.image_field == "image"
    assert outlines.kind == "polygonlabels"
    nested = """<View><Image name="i" value="$a"/><RectangleLabels name="r" toName="i"><View>
      <Label value="car" predicted_values="car, truck ,"/></View></RectangleLabels>
      <Labels name="t" toName="x"><Label value="text"/></Labels>
      <KeyPointLabels name="video" toName="v"><Label value="k"/></KeyPointLabels></View>"""
    (only,) = read_controls(nested)
    assert only.labels == [("car", "car"), ("truck", "car")]
    many = (
        '<RectangleLabels name="r" toName="i">' + '<Label value="x"/>' * 65 + "</RectangleLabels>"
    )
    for config, part in (
        (many, "limit of 64"),
        (" " * 300_000 + "<a/>", "at most 65536 characters"),
    ):
        with pytest.raises(RequestRefused, match=part):
            read_controls(config)
