"""The name of an adapter from every client to the runtime's rows, and the statuses of one that can't be applied."""

from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from kestrel_client import (
    AsyncKestrelAdmin,
    AsyncKestrelClient,
    InvalidArgumentError,
    NotFoundError,
    QueryTask,
)
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2
from kestrel_engine import AdapterSources
from kestrel_engine.adapters.library import AdapterLibrary
from kestrel_engine.adapters.origins.origins import Origins
from kestrel_grpc.http.dialects.models import set_model
from tests.engine.fakes import fake_model
from tests.engine.inside import inside
from tests.http.conftest import http  # noqa: F401  # A fixture.
from tests.hub_stand import Stand, stand  # noqa: F401  # A fixture.
from tests.kserve.conftest import infer
from tests.service.conftest import EndlessRuntime, Served, raw_image
from tests.service.security.test_admin import CONFIG, KEY, METADATA
from tests.service.statuses import failure
from tests.waiting import until

NAME = "mine@3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = fake_model("moondream3").text
    proj = "text.blocks.0.attn.proj"
    sides = {f"{proj}.A": torch.ones(1, text.dim), f"{proj}.B": torch.ones(text.dim, 1)}
    save_file(sides, tmp_path / f"{NAME}.safetensors")
    save_file({f"{proj}.A": torch.ones(1, 7)}, tmp_path / "unfit.safetensors")
    return tmp_path


def add_adapters(served: Served, origins: Origins | Path) -> None:
    """Gives a server on the fake runtime, which has no adapters, those of the test."""
    origins = Origins(origins) if isinstance(origins, Path) else origins
    inside(served.engine).submitter.adapters = AdapterLibrary(
        origins, fake_model("moondream3"), dtype=torch.float32,
        max_bytes=1 << 20,
    )  # fmt: skip


def applied(served: Served) -> list[str | None]:
    """The adapters of the prefill rows since the last call."""
    rows = [row for plan in served.runtime.plans for row in plan.prefill]
    served.runtime.plans.clear()
    return [row.adapter and row.adapter.name for row in rows]


def query(adapter: str) -> vision_service_pb2.QueryRequest:
    options = common_pb2.RequestOptions(adapter=adapter)
    return vision_service_pb2.QueryRequest(
        query=vision_service_pb2.QueryTask(question="?"), options=options
    )


async def test_every_client_can_name_one(http, folder: Path) -> None:  # noqa: F811
    served, client = await http()
    add_adapters(served, folder)
    await served.vision.Query(query(NAME))
    assert applied(served) == [NAME]
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as sdk:
        await sdk.query(None, "one?", adapter=NAME, max_tokens=2)
        await sdk.query(None, "two?", max_tokens=2)
        assert applied(served) == [NAME, None]
        await sdk.run_skill("query", None, {"question": "three?"}, adapter=NAME, max_tokens=2)
        await sdk.analyze(np.zeros((40, 60), np.uint8), [QueryTask("four?")], adapter=NAME)
        assert set(applied(served)) == {NAME}
    stub = GRPCInferenceServiceStub(served.channel)
    await stub.ModelInfer(infer(SKILL="query", QUESTION="five?", ADAPTER=NAME, MAX_TOKENS=2))
    assert applied(served) == [NAME]
    body = {"messages": [{"role": "user", "content": "six?"}], "max_tokens": 2}
    for number, model in enumerate((f"fake/{NAME}", f"moondream3-preview/{NAME}", "fake")):
        body["messages"][0]["content"] = f"six {number}?"  # type: ignore[index]
        response = await client.post("/v1/chat/completions", json=body | {"model": model})
        assert response.status_code == 200, response.text
    ollama = {"model": f"fake/{NAME}", "prompt": "seven?", "options": {"num_predict": 2}}
    assert (await client.post("/api/generate", json=ollama)).status_code == 200
    settings = {"adapter": NAME, "max_tokens": 2}
    response = await client.post("/v1/query", json={"question": "eight?", "settings": settings})
    assert response.status_code == 200, response.text
    assert applied(served) == [NAME, NAME, None, NAME, NAME]
    both = {"question": "nine?", "model": f"fake/{NAME}", "settings": {"adapter": "other"}}
    refused = await client.post("/v1/query", json=both)
    assert refused.status_code == 400 and f"beside '{NAME}'" in refused.text, refused.text


async def test_on_grpc_a_model_has_one_name(serve, folder: Path) -> None:
    """A client of gRPC sets two fields, so the server does not guess what a name means."""
    served = await serve()
    add_adapters(served, folder)
    wrong = ("gpt", "moondream3-preview", "moondream", "fake/mine", f"fake/{NAME}", "FAKE")
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as sdk:
        for name in wrong:
            with pytest.raises(NotFoundError, match=f"'{name}' is not served; .* fake") as error:
                await sdk.query(None, "what?", model=name)
            assert error.value.field_violations[0].field == "options.model"
        with pytest.raises(InvalidArgumentError, match="1 to 512 characters") as error:
            await sdk.query(None, "what?", model="fake/" + 100_000 * "x")
        assert len(str(error.value)) < 200
    assert applied(served) == []


@pytest.mark.parametrize(
    ("name", "model", "adapter"),
    [
        ("fake", "fake", ""),
        ("fake:latest", "fake", ""),
        ("fake/mine:latest", "fake", "mine"),
        ("fake/mine", "fake", "mine"),
        ("fake/team/mine@v1", "fake", "team/mine@v1"),
        ("org/model", "org/model", ""),
        ("org/model/team/mine", "org/model", "team/mine"),
        ("moondream/team/mine", "fake", "team/mine"),
        ("moondream3-preview/01J5@7", "fake", "01J5@7"),
        ("moondream/moondream2", "fake", ""),
        ("vikhyatk/moondream2", "fake", ""),
        ("vikhyatk/moondream2:latest", "fake", ""),
        ("moondream-2B", "fake", ""),
        ("moondream:1.8b", "fake", ""),
        ("vikhyatk/moondream2/01J5@7", "fake", "01J5@7"),
        ("moondream/moondream3-preview/team/mine", "fake", "team/mine"),
        ("vikhyatk/moondream9", "vikhyatk/moondream9", ""),
    ],
)
def test_names_of_models_with_adapters(name: str, model: str, adapter: str) -> None:
    options = common_pb2.RequestOptions()
    set_model(options, name, ("fake", "org/model"))
    assert (options.model, options.adapter) == (model, adapter)


async def test_one_that_the_server_fetches(serve, stand: Stand, tmp_path: Path) -> None:  # noqa: F811
    served = await serve()
    sources = AdapterSources(hub=("team/*",))
    add_adapters(served, Origins(None, sources, downloads=tmp_path, endpoint=stand.url))
    text = fake_model("moondream3").text
    proj = "text.blocks.0.attn.proj"
    sides = {f"{proj}.A": torch.ones(1, text.dim), f"{proj}.B": torch.ones(text.dim, 1)}
    stand.add("adapter.safetensors", save(sides), repo="team/mine")
    await served.vision.Query(query("team/mine"))
    assert applied(served) == ["team/mine"]
    stand.refuse["team/down"] = (500, "")
    cases = (
        ("other/mine", grpc.StatusCode.FAILED_PRECONDITION, "ADAPTER_REFUSED", "--adapter-hub"),
        ("team/down", grpc.StatusCode.UNAVAILABLE, "ADAPTER_UNAVAILABLE", "answers 500"),
        ("team/none", grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", "the hub has no adapter"),
    )
    for name, code, reason, words in cases:
        told = await failure(served.vision.Query(query(name)))
        assert (told.code, told.reason) == (code, reason) and words in told.message
        assert (told.retry_after_s is not None) == (code is grpc.StatusCode.UNAVAILABLE)
    assert (await served.vision.Query(query("team/mine"))).answers[0].text


async def test_prefixes_belong_to_an_adapter(serve, folder: Path) -> None:
    """The fake runtime also checks that no row reads a page of another adapter."""
    served = await serve()
    add_adapters(served, folder)
    sampling = {"max_tokens": 2}
    cached = []
    for adapter in (None, NAME, NAME, None):
        request = vision_service_pb2.QueryRequest(
            images=[raw_image()], query=vision_service_pb2.QueryTask(question="?", **sampling)
        )
        if adapter is not None:
            request.options.adapter = adapter
        cached.append((await served.vision.Query(request)).usage.cached_tokens > 80)
    assert cached == [False, False, True, True]
    assert len([piece for plan in served.runtime.plans for piece in plan.encode]) == 1


async def test_what_can_not_be_applied(serve, folder: Path) -> None:
    served = await serve()
    told = await failure(served.vision.Query(query(NAME)))
    assert told.code is grpc.StatusCode.NOT_FOUND and "--adapters-dir" in told.message
    add_adapters(served, folder)
    cases = (
        ("none", grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", "there is no adapter 'none'"),
        ("unfit", grpc.StatusCode.INVALID_ARGUMENT, "ADAPTER_UNFIT", "has the shape [1, 7]"),
        ("../x", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "is not the name"),
        ("", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "is not the name"),
    )
    for name, code, reason, words in cases:
        told = await failure(served.vision.Query(query(name)))
        assert (told.code, told.reason, told.fields) == (code, reason, ["options.adapter"])
        assert words in told.message and str(folder) not in told.message
    assert (await served.vision.Query(query(NAME))).answers[0].text


async def test_an_administrator_loads_and_drops_one(serve, folder: Path) -> None:
    served = await serve(EndlessRuntime(), server_config=CONFIG)
    async with AsyncKestrelAdmin(served.server.addresses[0], token=KEY, timeout=60) as admin:
        with pytest.raises(NotFoundError, match=r"adapter: there is no adapter .*--adapters-dir"):
            await admin.load_adapter(NAME)
        assert not await admin.unload_adapter(NAME)
        add_adapters(served, folder)
        loaded = await admin.load_adapter(NAME, model="fake")
        assert (loaded.name, loaded.loaded) == (NAME, True)
        assert loaded.size_bytes == 8 * fake_model("moondream3").text.dim
        assert served.engine.adapter_counts.loaded == (NAME,)
        request = query(NAME)
        running = served.vision.StreamQuery(request, metadata=METADATA)
        await running.read()
        assert await admin.unload_adapter(NAME) and not await admin.unload_adapter(NAME)
        counts = served.engine.adapter_counts
        assert counts.loaded == () and counts.num_bytes > 0
        assert not running.done()
        running.cancel()
        await until(lambda: not served.engine.num_requests)
        assert served.engine.adapter_counts.num_bytes == 0
        for name, kind, words in (
            ("unfit", InvalidArgumentError, r"adapter: 'unfit' can't be loaded: .*has the shape"),
            ("none", NotFoundError, "adapter: there is no adapter 'none'"),
            ("../x", InvalidArgumentError, r"adapter: '\.\./x' is not the name"),
        ):
            with pytest.raises(kind, match=words):
                await admin.load_adapter(name)
        for refused in (admin.load_adapter(NAME, model="x"), admin.unload_adapter(NAME, model="x")):
            with pytest.raises(NotFoundError, match="model: 'x' is not served"):
                await refused
