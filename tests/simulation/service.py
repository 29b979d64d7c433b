"""The service without sockets: requests of Moondream's REST interface go to the application of the HTTP port, past
guard, limits and edge; those for several samples are OpenAI's. Clients send and read slowly, stop to read, and
disconnect."""

import asyncio
import base64
import random
from collections import Counter
from typing import Any

import orjson

from kestrel_engine import EngineResult, InferenceEngine, RuntimeConfig, clock
from kestrel_grpc.batches.service import BatchService
from kestrel_grpc.edge.call_life import CallLife, CallWatchers, InFlight
from kestrel_grpc.edge.calls.call import Call
from kestrel_grpc.http.app import application
from kestrel_grpc.http.edge import HttpEdge
from kestrel_grpc.http.services import HttpServices
from kestrel_grpc.images.request_images import RequestImages
from kestrel_grpc.images.store import ImageStore
from kestrel_grpc.images.upload import UploadRoom
from kestrel_grpc.kserve.service import InferenceService
from kestrel_grpc.monitoring.call_statistics import CallStatistics
from kestrel_grpc.monitoring.load import LoadMeter
from kestrel_grpc.security.admission.guard import Guard
from kestrel_grpc.security.connections.connection_guard import ConnectionGuard
from kestrel_grpc.served_model import ServedModel, ServedModels
from kestrel_grpc.services.image import ImageService
from kestrel_grpc.services.model import ModelService
from kestrel_grpc.services.vision import VisionService
from kestrel_grpc.settings.security import CallLimits, SecurityConfig

from .callers import Caller
from .invariants import CallerRequest
from .questions import Question, image

_MESSAGE_BYTES = 2**20
_TEXTS = {"query": "answer", "caption": "caption"}
_REFUSALS = {429, 503}
"""Too many requests, and a server that stops or has failed."""


def simple_question(rng: random.Random) -> Question:
    """A question that this interface can ask."""
    picture = rng.choice(["", "png 0", "png 1", "png 2"])
    settings = (("max_tokens", rng.choice([1, 4, 20])), ("temperature", 0))
    skill = rng.choice(["query", "query", "caption"])
    if skill == "query":
        asks = f"{'why ' * rng.randint(1, 5)}{rng.choice('xyz')}"
        return Question(skill, picture, (("question", asks),), settings)
    return Question(skill, picture or "png 0", (("length", "short"),), settings)


def num_samples(question: Question, is_stream: bool) -> int:
    """So many answers are asked for. Each is a request of the engine. A stream has one."""
    return 3 if not is_stream and dict(question.arguments).get("question", "").endswith("z") else 1


class Service:
    """The application over one engine. ``calls``: how often each call ended."""

    def __init__(self, engine: InferenceEngine, config: RuntimeConfig) -> None:
        model = ServedModel(config)
        model.ready(engine)
        served = ServedModels(model)
        security = SecurityConfig(
            calls=CallLimits(
                calls=8, held_bytes=4 * _MESSAGE_BYTES, deadline_s=60, read_s=10, write_s=5
            )
        )
        self.guard = Guard(security, _MESSAGE_BYTES, served.check_room)
        self.in_flight = InFlight()
        self.calls: Counter[str] = Counter()
        load, statistics = LoadMeter(served), CallStatistics()

        def end_call(call: Call) -> None:
            self.calls[call.request_id] += 1
            load.on_call(call)
            statistics.on_call(call)

        connections = ConnectionGuard(security.connections, 0, None)
        life = CallLife(self.guard, connections, self.in_flight, CallWatchers([end_call]))
        images = RequestImages(ImageStore(2**20))
        vision = VisionService(served, images, _MESSAGE_BYTES)
        self.app = application(
            HttpEdge(life),
            HttpServices(
                vision,
                ImageService(served, images, UploadRoom(2**20), 30),
                ModelService(
                    served, load, max_message_bytes=_MESSAGE_BYTES, image_store_bytes=2**20
                ),
                InferenceService(served, vision, statistics),
                BatchService(None),
                served,
            ),
            self.guard,
            None,
        )

    def check_idle(self) -> None:
        """What holds when all requests have ended."""
        assert self.in_flight.count == 0 and self.guard.admission.calls == 0
        assert self.guard.held_bytes == 0, f"{self.guard.held_bytes} bytes of messages are held"
        assert self.guard.refusals.num_delayed == 0
        twice = {request_id: n for request_id, n in self.calls.items() if n != 1}
        assert not twice, f"calls that did not end once: {twice}"


class Client:
    """The client's side of one request: what ASGI's ``receive`` and ``send`` do."""

    def __init__(self, body: bytes, rng: random.Random) -> None:
        self._parts = [body[: len(body) // 2], body[len(body) // 2 :]]
        self._send_s = rng.choice([0.0, 0.0, 0.1, 3.0, 20.0])
        self._read_s = rng.choice([0.0, 0.0, 0.0, 0.3, 2.0, 20.0])
        self.leaves_after_s = rng.choice([None, None, None, 0.0, 0.2, 2.0])
        self._gone = asyncio.Event()
        self.status, self.body = 0, b""
        self.is_complete = False

    @property
    def is_slow(self) -> bool:
        """Whether it sends or reads more slowly than the server lets it."""
        return self._send_s > 10 or self._read_s > 5

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if not self._parts:
            await self._gone.wait()
        sending = asyncio.ensure_future(asyncio.sleep(self._send_s))
        leaving = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            leaving.cancel()
        if self._gone.is_set():
            return {"type": "http.disconnect"}
        part = self._parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(self._parts)}

    async def send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            return
        await asyncio.sleep(self._read_s)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            self.is_complete = not message["more_body"]


class HttpCaller(Caller):
    """A caller of the service."""

    async def ask(self) -> None:
        world, rng = self._world, self._world.rng
        asked = self._next(rng.choice(world.simple))
        is_stream = rng.random() < 0.5
        body = _body(asked.question, is_stream)
        client = Client(body, rng)
        world.watch.began(asked)
        calling = asyncio.get_running_loop().create_task(
            world.service.app(
                _scope(asked, is_stream, rng.choice([len(body), len(body), None])),
                client.receive,
                client.send,
            ),
            name=asked.request_id,
        )
        if client.leaves_after_s is not None:
            await asyncio.wait({calling}, timeout=client.leaves_after_s)
            client.leave()
            asked.left = not calling.done()
        await calling
        assert not world.engine.goes_on(asked.request_id), (
            f"{asked} ended, and a request of it goes on"
        )
        how = "left" if asked.left else f"HTTP {client.status}"
        world.note("ended", asked.request_id, how, client.body.hex())
        world.watch.closed(asked, clock.now(), how)
        if not asked.left:
            alone = world.answers[asked.question]
            assert isinstance(alone, EngineResult)
            self._check(asked, client, alone, is_stream)

    def _check(
        self, asked: CallerRequest, client: Client, alone: EngineResult, is_stream: bool
    ) -> None:
        name = _TEXTS[asked.question.skill]
        samples = num_samples(asked.question, is_stream)
        if client.status == 200 and samples > 1:
            choices = orjson.loads(client.body)["choices"]
            told = [(each["message"]["content"], each["finish_reason"]) for each in choices]
            assert told == samples * [(alone.output[name], alone.finish_reason)], (asked, told)
            return
        if client.status == 200 and is_stream:
            told = [orjson.loads(line[6:]) for line in client.body.split(b"\n\n") if line]
            if "error" not in told[-1] and client.is_complete:
                assert told[-1]["completed"] and told[-1][name] == alone.output[name], asked
                assert "".join(each["chunk"] for each in told) == alone.output[name], asked
                return
        elif client.status == 200:
            answer = orjson.loads(client.body)
            assert answer[name] == alone.output[name], (asked, answer)
            assert answer["finish_reason"] == alone.finish_reason, (asked, answer)
            return
        elif client.status in _REFUSALS:
            return
        began = asked.began_at
        injected = self._world.faults.since(began - 300, *_FAULTS)
        assert client.is_slow or injected, (asked, client.status, client.body)


_FAULTS = (
    *("refused", "failing", "out of memory", "not finite", "bad image", "hang", "shutdown"),
    *("lost decoder", "stuck decoder", "slow"),
)


def _body(question: Question, is_stream: bool) -> bytes:
    samples = num_samples(question, is_stream)
    if samples > 1:
        content = [{"type": "text", "text": dict(question.arguments)["question"]}]
        if question.image:
            url = f"data:image/png;base64,{base64.b64encode(image(question.image)).decode()}"
            content.append({"type": "image_url", "image_url": {"url": url}})
        message = {"role": "user", "content": content}
        return orjson.dumps({"n": samples, "messages": [message], **dict(question.settings)})
    fields: dict[str, Any] = {**dict(question.arguments), "settings": dict(question.settings)}
    if question.image:
        fields["image_url"] = base64.b64encode(image(question.image)).decode()
    return orjson.dumps({**fields, "stream": is_stream})


def _scope(asked: CallerRequest, is_stream: bool, num_bytes: int | None) -> dict[str, Any]:
    several = num_samples(asked.question, is_stream) > 1
    path = "/v1/chat/completions" if several else f"/v1/{asked.question.skill}"
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"x-request-id", asked.request_id.encode()),
            (b"host", b"localhost"),
            *([] if num_bytes is None else [(b"content-length", str(num_bytes).encode())]),
            (b"content-type", b"application/json"),
        ],
        "client": ("10.0.0.1", 1),
        "server": ("10.0.0.2", 80),
        "state": {},
    }
