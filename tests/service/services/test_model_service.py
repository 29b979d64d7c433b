"""ModelService: skills with their schemas, adapters, and lists in pages."""

import base64
import json
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest

from kestrel_client._pb.kestrel.v1 import model_service_pb2 as pb
from kestrel_client._pb.kestrel.v1 import vision_service_pb2
from kestrel_engine import SkillRegistry
from kestrel_engine.skills import CaptionSkill
from tests.service.conftest import Served, raw_image
from tests.service.services.options.test_adapters import (  # noqa: F401  # A fixture.
    NAME,
    add_adapters,
    folder,
)
from tests.service.statuses import failure


class Undeclared:
    """A skill that does not say what it takes."""

    name = "undeclared"
    build, new_control, new_output = (
        getattr(CaptionSkill(), name) for name in ("build", "new_control", "new_output")
    )


async def schemas(served: Served) -> dict[str, Any]:
    model = (await served.models.GetModel(pb.GetModelRequest())).model
    found = {each.name: json.loads(each.arguments_schema) for each in model.skills}
    for schema in found.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    return found


async def test_a_skill_says_what_it_takes(serve) -> None:
    served = await serve(skills=SkillRegistry([*SkillRegistry.default(), Undeclared()]))
    found = await schemas(served)
    assert list(found) == ["query", "caption", "point", "detect", "segment", "gaze", "undeclared"]
    for skill, arguments, settings in (
        ("query", {"question": "what?", "reasoning": True}, {"max_reasoning_tokens": 2}),
        ("query", {"question": "what?", "history": [["a", "b"]]}, {"stop": ["."], "seed": 3}),
        ("caption", {"length": "short"}, {"temperature": 0.5, "logit_bias": {"7": 1.5}}),
        ("undeclared", {"length": "short"}, {"max_tokens": 2}),
    ):
        jsonschema.validate({"arguments": arguments, "settings": settings}, found[skill])
        task = vision_service_pb2.SkillTask(name=skill, arguments=arguments, settings=settings)
        await served.vision.RunSkill(
            vision_service_pb2.RunSkillRequest(image=raw_image(), skill=task)
        )
    for skill, arguments, settings in (
        ("query", {}, {}),
        ("query", {"question": "what?", "colour": "red"}, {}),
        ("caption", {"length": "endless"}, {}),
        ("detect", {"object": "cat"}, {"min_score": 2}),
        ("point", {"object": "cat"}, {"stop": ["."]}),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"arguments": arguments, "settings": settings}, found[skill])
        task = vision_service_pb2.SkillTask(name=skill, arguments=arguments, settings=settings)
        told = await failure(
            served.vision.RunSkill(
                vision_service_pb2.RunSkillRequest(image=raw_image(), skill=task)
            )
        )
        assert told.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_adapters_are_listed_page_by_page(serve, folder: Path) -> None:  # noqa: F811
    served = await serve()

    async def page(**fields: Any) -> pb.ListAdaptersResponse:
        return await served.models.ListAdapters(pb.ListAdaptersRequest(**fields))

    assert await page() == pb.ListAdaptersResponse()
    add_adapters(served, folder)
    for name in ("b.pt", "no name.pt", "notes.txt"):
        (folder / name).write_bytes(b"")
    (folder / "a").mkdir()
    await served.engine.load_adapter(NAME)
    first = await page(model="fake", page_size=3)
    assert [each.name for each in first.adapters] == ["a", "b", NAME]
    assert [each.loaded for each in first.adapters] == [False, False, True]
    assert first.adapters[2].size_bytes == served.engine.adapter_counts.num_bytes
    (folder / "a").rmdir()
    rest = await page(page_size=3, page_token=first.next_page_token)
    assert ([each.name for each in rest.adapters], rest.next_page_token) == (["unfit"], "")
    assert len((await page()).adapters) == 3


async def test_models_are_listed_page_by_page(serve) -> None:
    served = await serve()
    asked = pb.ListModelsRequest(page_size=1)
    listed = await served.models.ListModels(asked)
    assert ([each.name for each in listed.models], listed.next_page_token) == (["fake"], "")


@pytest.mark.parametrize(
    "token", ["x", "\N{EAGLE}", "YQ==", base64.b64encode(b"models\n").decode()]
)
async def test_a_token_of_another_list_is_refused(serve, token: str) -> None:
    served = await serve()
    told = await failure(served.models.ListAdapters(pb.ListAdaptersRequest(page_token=token)))
    assert (told.code, told.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["page_token"])
    assert "leave it empty for the first page" in told.message
