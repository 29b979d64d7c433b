"""Several models in one server: each request reaches the model that it names, and one model's failure is its own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kestrel_client import (
    AsyncKestrelAdmin,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from kestrel_client._pb.inference import grpc_service_pb2 as kserve_pb
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kestrel_client._pb.kestrel.v1 import admin_service_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from kestrel_client._pb.kestrel.v1.image_service_pb2_grpc import ImageServiceStub
from kestrel_client._pb.kestrel.v1.model_service_pb2_grpc import ModelServiceStub
from kestrel_client._pb.kestrel.v1.vision_service_pb2_grpc import VisionServiceStub
from kestrel_engine import (
    ConfigError,
    InferenceEngine,
    InvalidRequest,
    ModelLoadError,
    RuntimeConfig,
)
from kestrel_grpc import model_changes
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.served_model import State
from kestrel_grpc.settings.flags import Parser
from kestrel_grpc.settings.http import HttpConfig
from kestrel_grpc.settings.model import (
    add_model_flags,
    other_model,
    runtime_configs,
)
from kestrel_grpc.settings.security import SecurityConfig
from kestrel_grpc.settings.server import ServerConfig
from kestrel_grpc.settings.sources import SettingsError
from kestrel_grpc.settings.telemetry import TelemetryConfig
from tests.engine.fakes import fake_build
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.security.test_admin import CONFIG, KEY, METADATA
from tests.waiting import until


@pytest.fixture(scope="module", autouse=True)
def frozen_again() -> Iterator[None]:
    """What an unload has left unfrozen: each collection of later tests would visit all that was imported."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def unfreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of other things than memory: to collect all garbage takes 0.3 s."""
    monkeypatch.setattr(model_changes, "_free_memory", lambda held: None)


LETTER_A = 100 + ord("a")
SERVING = health_pb2.HealthCheckResponse.SERVING


class Two:
    """A server with the models "first", which answers a, and "second", which answers b."""

    def __init__(
        self,
        names: tuple[str, str] = ("first", "second"),
        security: SecurityConfig | None = None,
        telemetry: TelemetryConfig | None = None,
        loads: bool = True,
    ) -> None:
        self.loads = loads
        self.engines: dict[str, InferenceEngine] = {}
        config = RuntimeConfig(max_batch_size=LIMITS.max_batch_size)

        letters = dict(zip(names, (LETTER_A, LETTER_A + 1), strict=False))

        async def load(config: RuntimeConfig, observer=None, progress=None) -> InferenceEngine:
            name = Path(config.model_path or config.model).name
            if progress is not None:
                for part in range(3):
                    progress(part, 3, "parts")
                await self.held.wait()
            if name == "broken":
                raise ModelLoadError("no such weights")
            runtime = FakeRuntime(LIMITS, lambda fed: letters.get(name, LETTER_A + 2))
            built = fake_build(config, runtime)
            built = dataclasses.replace(built, info=dataclasses.replace(built.info, model=name))
            engine = self.engines[name] = InferenceEngine(config, built, observer=observer)
            return engine

        self.held = asyncio.Event()
        self.held.set()
        first, second = (dataclasses.replace(config, model=name) for name in names)
        self.server = KestrelServer(
            ServerConfig(
                listen=("127.0.0.1:0",),
                http=HttpConfig(http_listen=("127.0.0.1:0",)),
                security=security or SecurityConfig(),
                telemetry=telemetry or TelemetryConfig(),
                model_folders=("/tmp",),
            ),
            first,
            lambda: load(first),
            others=[second],
            load_model=load,
        )

    async def __aenter__(self) -> Two:
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.server.addresses[0])
        self.vision = VisionServiceStub(self.channel)
        self.admin = AsyncKestrelAdmin(self.server.addresses[0], token=KEY)
        if self.loads:
            await self.server.load()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.channel.close()
        await self.admin.aclose()
        await self.server.stop(grace_s=0)

    async def answer(
        self, model: str | None = None, image_id: str | None = None, metadata=()
    ) -> str:
        request = pb.QueryRequest(query=pb.QueryTask(question="What?", max_tokens=3))
        if model is not None:
            request.options.model = model
        if image_id is not None:
            request.images.add(image_id=image_id)
        response = await self.vision.Query(request, metadata=metadata)
        assert response.info.model == model or model is None
        return response.answers[0].text

    async def health(self, name: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def test_each_request_reaches_its_model() -> None:
    async with Two() as two:
        assert await two.answer() == await two.answer("first") == "aaa"
        assert await two.answer("second") == "bbb"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await two.answer("third")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "this server serves first, second" in str(refused.value.details())
        streamed = two.vision.StreamQuery(
            pb.QueryRequest(
                query=pb.QueryTask(question="What?", max_tokens=3), options={"model": "second"}
            )
        )
        events = [event async for event in streamed]
        assert events[0].started.model == "second"
        assert events[-1].final.answers[0].text == "bbb"


async def test_a_stored_image_serves_all_models() -> None:
    async with Two() as two:
        put = image_service_pb2.PutImageRequest(image=raw_image())
        image_id = (await ImageServiceStub(two.channel).PutImage(put)).image.image_id
        assert await two.answer("first", image_id) == "aaa"
        assert await two.answer("second", image_id) == "bbb"


async def test_models_are_listed_and_have_health() -> None:
    async with Two() as two:
        models = ModelServiceStub(two.channel)
        listed = await models.ListModels(model_service_pb2.ListModelsRequest())
        assert [model.name for model in listed.models] == ["first", "second"]
        one = await models.GetModel(model_service_pb2.GetModelRequest(model="second"))
        assert one.model.name == "second"
        info = await models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
        assert info.default_model == "first"
        load = await models.GetLoad(model_service_pb2.GetLoadRequest())
        assert load.max_batch_size == 2 * LIMITS.max_batch_size
        assert load.pages == 2 * LIMITS.num_pages
        assert await two.health("first") == await two.health("second") == SERVING


async def test_a_failed_model_leaves_the_others() -> None:
    async with Two() as two:
        await two.engines["second"].shutdown()
        first, second = two.server.served
        assert (first.state, second.state) == (State.READY, State.FAILED)
        assert await two.answer() == "aaa"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await two.answer("second")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "second has failed; an administrator must unload" in str(refused.value.details())
        two.server._health.update()
        assert await two.health("second") != SERVING
        assert await two.health("first") == await two.health("") == SERVING


async def test_two_models_of_one_name_are_refused() -> None:
    async with Two(names=("same", "same"), loads=False) as two:
        with pytest.raises(ConfigError, match="two models of this server have this name"):
            await two.server.load()
        assert not two.server.served.engines


async def test_folders_of_one_name_are_refused_before_they_are_loaded(tmp_path: Path) -> None:
    folders = [tmp_path / parent / "same" for parent in ("a", "b")]
    for folder in folders:
        folder.mkdir(parents=True)
    async with Two(names=(str(folders[0]), str(folders[1])), loads=False) as two:
        models = ModelServiceStub(two.channel)
        listed = await models.ListModels(model_service_pb2.ListModelsRequest())
        assert {each.state for each in listed.models} == {model_service_pb2.MODEL_STATE_LOADING}
        with pytest.raises(ConfigError, match="rename the file or folder of one"):
            await two.server.load()
        assert list(two.engines) == ["same"] and not two.server.served.engines


async def test_administration_covers_all_models() -> None:
    async with Two(security=CONFIG["security"]) as two:
        await two.answer("first", metadata=METADATA)
        await two.answer("second", metadata=METADATA)
        admin = AdminServiceStub(two.channel)
        asked = admin_service_pb2.GetStatisticsRequest()
        statistics = await admin.GetStatistics(asked, metadata=METADATA)
        parts = [engine.stats.prompt_positions for engine in two.engines.values()]
        assert statistics.prompt_positions == sum(parts) and min(parts) > 0
        await admin.FlushCaches(admin_service_pb2.FlushCachesRequest(), metadata=METADATA)
        assert not any(engine.stats.pages_cached for engine in two.engines.values())


@pytest.mark.usefixtures("unfreed")
async def test_models_are_loaded_swapped_and_unloaded_while_others_serve(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kestrel_grpc.services.admin")
    async with Two(security=CONFIG["security"]) as two:
        admin = two.admin
        two.held.clear()
        loading = admin.load_model("/tmp", {"max-queue": "7"}, make_default=True)
        assert (await anext(loading)).step == "parts"
        with pytest.raises(FailedPreconditionError, match="another model is being loaded"):
            await admin.load_model("/tmp").result()
        assert await two.answer("second", metadata=METADATA) == "bbb"
        models = ModelServiceStub(two.channel)
        asked = model_service_pb2.ListModelsRequest()
        listed = await models.ListModels(asked, metadata=METADATA)
        states = {each.name: each.state for each in listed.models}
        assert list(states) == ["first", "second", "tmp"]
        assert states["tmp"] == model_service_pb2.MODEL_STATE_LOADING
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"tmp is still loading .*parts, 66 %"
        ) as early:
            await two.answer("tmp", metadata=METADATA)
        # A front tries another worker.
        assert ("x-kestrel-not-begun", "1") in tuple(early.value.trailing_metadata() or ())
        for refused in (admin.unload_model("tmp"), admin.set_default_model("tmp")):
            with pytest.raises(FailedPreconditionError, match=r"tmp is (being loaded|not ready)"):
                await refused
        assert "UnloadModel" not in caplog.text, "nothing was changed"
        two.held.set()
        rest = [event async for event in loading]
        loaded = await loading.result()
        assert loaded.model == "tmp" and rest[-1].done == 2
        two.held.clear()  # A second load of it would not end.
        with pytest.raises(FailedPreconditionError, match="tmp is served already"):
            await admin.load_model("/tmp").result()
        two.held.set()
        assert two.engines["tmp"] in two.server.served.engines
        assert two.server.served.default.config.max_queue == 7
        assert (
            await two.answer(metadata=METADATA)
            == await two.answer("tmp", metadata=METADATA)
            == "ccc"
        )
        assert await two.answer("first", metadata=METADATA) == "aaa"

        await admin.unload_model("first")
        assert 'UnloadModel model: "first" -> ' in caplog.text
        assert two.server.served.names == ("tmp", "second")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await two.answer("first", metadata=METADATA)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert await two.health("first") != SERVING
        assert await two.health("tmp") == SERVING
        with pytest.raises(FailedPreconditionError, match="tmp is the default model"):
            await admin.unload_model("tmp")
        assert await admin.set_default_model("second") == "tmp"
        await admin.unload_model("tmp", grace_s=0)
        assert await two.answer(metadata=METADATA) == "bbb"


async def test_a_model_that_cannot_be_loaded_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    # A relative path is not in the server's folder /tmp, wherever the checkout is.
    monkeypatch.chdir("/")
    async with Two(security=CONFIG["security"]) as two:
        admin = two.admin
        own = {"max-queue": "3"}
        for source, settings, kind, words in (
            ("", {}, InvalidArgumentError, "source: must have 1 to 4096 characters"),
            ("nosuch", {}, InvalidArgumentError, "source: 'nosuch' is no known model"),
            ("/etc/passwd", {}, InvalidArgumentError, "in no folder from which this server loads"),
            ("/tmp,max-queue=3", {}, InvalidArgumentError, "source: '/tmp,max-queue=3' is no"),
            ("/tmp", {"max-queu": "3"}, InvalidArgumentError, "did you mean max-queue"),
            ("/tmp", {"max-queue": "x"}, InvalidArgumentError, r'settings\["max-queue"\]: '),
            ("/tmp", {"max-queue": "-3"}, InvalidArgumentError, r'settings\["max-queue"\]: -3'),
            (f"{tmp_path}/broken", own, FailedPreconditionError, "no such weights"),
        ):
            with pytest.raises(kind, match=words):
                await admin.load_model(source, settings).result()
        with pytest.raises(NotFoundError, match="this server serves first, second"):
            await admin.unload_model("third")
        with pytest.raises(NotFoundError):
            await admin.set_default_model("third")
        assert two.server.served.names == ("first", "second")
        assert await two.answer("second", metadata=METADATA) == "bbb"


@pytest.mark.usefixtures("unfreed")
async def test_a_failed_model_may_be_unloaded() -> None:
    async with Two(security=CONFIG["security"]) as two:
        await two.engines["second"].shutdown()
        await two.admin.unload_model("second")
        assert two.server.served.names == ("first",)


@pytest.mark.parametrize("is_held", [False, True])
async def test_an_unloaded_model_is_freed_also_if_something_holds_it_meanwhile(
    monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    if is_held:
        monkeypatch.setattr(model_changes, "_PAUSES_S", (0.001,))
    async with Two(security=CONFIG["security"]) as two:
        held = weakref.ref(two.engines["second"])
        kept = [two.engines.pop("second")][: int(is_held)]
        await two.admin.unload_model("second", grace_s=0)
        del kept

        def freed():
            gc.collect()
            return held() is None

        await until(freed)  # A task that is about to end may hold it for a moment.


async def test_http_and_kserve_route_by_name() -> None:
    async with Two() as two:
        base = f"http://{two.server.http_addresses[0]}"
        async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
            told = []
            for model in ("second", "moondream2", "first"):
                message = {"role": "user", "content": "What?"}
                body = {"model": model, "messages": [message], "max_tokens": 3}
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                told.append((answer["model"], answer["choices"][0]["message"]["content"]))
            assert told == [("second", "bbb"), ("first", "aaa"), ("first", "aaa")]
            listed = (await client.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["first", "second"]
            body = {"model": "second", "prompt": "What?", "options": {"num_predict": 3}}
            lines = (await client.post("/api/generate", json=body)).text.splitlines()
            assert {json.loads(line)["model"] for line in lines} == {"second"}
        stub = GRPCInferenceServiceStub(two.channel)
        for name, answer in (("moondream", "a"), ("second", "b")):
            asked = await stub.ModelMetadata(kserve_pb.ModelMetadataRequest(name=name))
            config = await stub.ModelConfig(kserve_pb.ModelConfigRequest(name=name))
            assert asked.name == config.config.name == name
            request = kserve_pb.ModelInferRequest(model_name=name)
            for key, text in (("SKILL", "query"), ("QUESTION", "What?")):
                tensor = request.inputs.add(name=key, datatype="BYTES", shape=[1])
                tensor.contents.bytes_contents.append(text.encode())
            tensor = request.inputs.add(name="MAX_TOKENS", datatype="INT32", shape=[1])
            tensor.contents.int_contents.append(3)
            output = (await stub.ModelInfer(request)).raw_output_contents[0]
            assert json.loads(output[4:])["answer"] == 3 * answer
        index = await stub.RepositoryIndex(kserve_pb.RepositoryIndexRequest())
        assert [model.name for model in index.models] == ["moondream", "second"]


def parsed(*arguments: str, several: bool = True) -> argparse.Namespace:
    parser = Parser()
    add_model_flags(parser, {}, several=several)
    return parser.parse_args(arguments)


def test_settings_of_one_model() -> None:
    text = "moondream2,kv-cache-gib=8,device=cuda:1,no-compile=on,precision=fp8-kv"
    first, second = runtime_configs(
        parsed("--model", "kestrel-small", "--model", text, "--max-queue", "7")
    )
    assert (first.model, first.device, first.max_queue) == ("kestrel-small", "auto", 7)
    assert (second.model, second.device, second.max_queue) == ("moondream2", "cuda:1", 7)
    assert second.kv_cache_gib == 8 and first.kv_cache_gib is None
    assert first.compile and not second.compile
    assert (first.kv_cache_dtype, second.kv_cache_dtype) == ("auto", "fp8")
    third = other_model(first, "kestrel-small", {"precision": "fp8"})
    assert (third.dtype, third.fp8_gemms, third.kv_cache_dtype) == ("bfloat16", "all", "fp8")
    with pytest.raises(
        InvalidRequest, match="is not a setting of a model; did you mean kv-cache-gib"
    ):
        other_model(first, "kestrel-small", {"kv-cache-gb": "3"})
    (only,) = runtime_configs(parsed())
    assert only == RuntimeConfig()


def test_a_caller_names_files_in_the_servers_folders_only(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "models", tmp_path / "secret"
    allowed.mkdir()
    outside.mkdir()
    (allowed / "link").symlink_to(outside)
    (only,) = runtime_configs(parsed())

    def told(source: str, folders: tuple[str, ...] = (str(allowed),), **settings: str) -> str:
        with pytest.raises(InvalidRequest) as caught:
            other_model(only, source, settings, folders)
        (place,) = settings.values() or [source]
        where = [f'settings["{name}"]' for name in settings] or ["source"]
        assert [caught.value.field] == where
        return caught.value.message.replace(place, "PLACE")

    def told_of(name: str, place: str, folders: tuple[str, ...] = (str(allowed),)) -> str:
        if name == "source":
            return told(place, folders)
        return told("kestrel-small", folders, **{name: place})

    for name in ("source", "weights", "tokenizer", "refiner"):
        there = told_of(name, str(outside))
        assert "--model-folders" in there
        # The same words for what does not exist, what a link names, and what climbs out of a folder.
        assert there == told_of(name, f"{outside}/none") == told_of(name, f"{allowed}/link")
        assert there == told_of(name, f"{allowed}/../secret") == told_of(name, "/dev/zero")
        assert there == told_of(name, str(outside), ())
    assert told("secret") == told("s3://other/x") == told("s3://models/../x", ("s3://models",))
    assert other_model(only, str(allowed), {}, (str(allowed),)).model == str(allowed)
    assert other_model(only, str(outside), {}, (), {str(outside)}).model == str(outside)
    assert other_model(only, "s3://models/x", {}, ("s3://models/",)).model == "s3://models/x"
    for name in ("moondream2", "org/repo", "org/repo@main:a.safetensors"):
        assert other_model(only, name, {}).model == name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "a", "--model", "a"], "a is given twice"),
        (["--model", "a,kv-cach-gib=3"], "did you mean kv-cache-gib?"),
        (["--model", "a,kv-cache-gib"], "is not SETTING=VALUE"),
        (["--model", "a,kv-cache-gib=much"], "kv-cache-gib=much"),
        (
            ["--model", "a,precision=perhaps"],
            "precision=perhaps: must be one of auto, float32, bfloat16",
        ),
        (["--model", "a", "--model", "b", "--weights", "w"], "--model NAME,weights=PATH"),
        (["--model", "a"] * 17, "17 models are given"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("?", r"\?")):
        runtime_configs(parsed(*arguments))
