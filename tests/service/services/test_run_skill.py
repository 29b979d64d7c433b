"""RunSkill and StreamRunSkill over a socket: the five skills by name, and the plug-in of docs/develop/skills.md."""

import asyncio
import re
import types
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import struct_pb2
from PIL import Image

from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import SkillRegistry
from kestrel_grpc.process.skill_plugins import skill_registry
from kestrel_grpc.settings.flags import SettingsError
from tests.service.conftest import raw_image
from tests.service.statuses import failure

PIXELS = np.full((40, 60, 3), 200, np.uint8)
"""What raw_image() holds."""
INVALID = grpc.StatusCode.INVALID_ARGUMENT
GUIDE = Path(__file__).parents[3] / "docs/develop/skills.md"
SOURCE, CALL = re.findall(
    r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE
)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """The guide's skill, saved as it says, loaded as ``serve --skill`` does."""
    (tmp_path / "yes_no.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return skill_registry(["yes_no:YesNoSkill"])


def struct(**values):
    message = struct_pb2.Struct()
    message.update(values)
    return message


def run(skill="query", arguments=None, *, image=True, settings=None, options=None, **fields):
    return pb.RunSkillRequest(
        image=raw_image() if image else None,
        options=options,
        skill=pb.SkillTask(
            name=skill,
            arguments=struct(**({"question": "what?"} if arguments is None else arguments)),
            settings=struct(**(settings or {})),
            **fields,
        ),
    )


def stream(served, request):
    return served.vision.StreamRunSkill(request)


async def test_the_guides_skill_answers_over_the_wire(serve, plugin):
    served = await serve(skills=plugin)
    question = {"question": "Is there a cat?"}
    reply = await served.vision.RunSkill(run("yes_no", question))
    assert reply.output.fields.keys() == {"yes"}
    assert reply.finish_reason == common_pb2.FINISH_REASON_STOP
    assert reply.usage.output_tokens == 1
    (seen,) = reply.info.images
    assert (seen.size.width, seen.size.height) == (60, 40)
    assert seen.image_id and reply.info.model == "fake"
    events = [event async for event in stream(served, run("yes_no", question))]
    assert [e.WhichOneof("event") for e in events] == ["started", "text_delta", "final"]
    assert events[0].started == events[2].final.info
    assert events[1].text_delta.text == ("yes" if reply.output["yes"] else "no")
    assert events[2].final.output == reply.output
    direct = await served.engine.submit("yes_no", PIXELS, question)
    assert (await direct.result()).output == {"yes": reply.output["yes"]}
    answers = set()
    for n in range(20):
        answer = await served.vision.RunSkill(run("yes_no", {"question": f"{n}?"}))
        answers.add(answer.output["yes"])
    assert answers == {True, False}, "the model decides"


async def test_the_guides_skill_is_listed_and_refuses_well(serve, plugin):
    served = await serve(skills=plugin)
    (model,) = (await served.models.ListModels(model_service_pb2.ListModelsRequest())).models
    assert (
        " ".join(skill.name for skill in model.skills)
        == "query caption point detect segment gaze yes_no"
    )
    told = await failure(served.vision.RunSkill(run("yes_no", {"question": " "})))
    assert (told.code, told.fields) == (INVALID, ["skill.arguments.question"])
    told = await failure(served.vision.RunSkill(run("yes_no", {})))
    assert told.fields == ["skill.arguments.question"]
    told = await failure(served.vision.RunSkill(run("yes_no", {"question": "?", "x": 1})))
    assert told.fields == ["skill.arguments.x"]
    told = await failure(served.vision.RunSkill(run("yes_no", {"question": "x" * 400})))
    assert (told.fields, told.reason) == (["skill.arguments.question"], "CONTEXT_LENGTH_EXCEEDED")
    told = await failure(served.vision.RunSkill(run("yes_no", image=False)))
    assert told.fields == ["image"]
    told = await failure(
        served.vision.RunSkill(run("yes_no", max_tokens=3, sampling={"top_p": 0.5}))
    )
    assert told.fields == ["skill.max_tokens"]


async def test_the_guides_call_runs_as_it_stands(serve, plugin, capsys):
    served = await serve(skills=plugin)
    Image.new("RGB", (60, 40)).save("picture.jpg")  # the fixture's folder is the current one
    code = compile(CALL.replace("127.0.0.1:50051", served.server.addresses[0]), "guide", "exec")
    await asyncio.to_thread(exec, code, {})
    assert capsys.readouterr().out in ("True\n", "False\n")


GREEDY = {"max_tokens": 6, "sampling": common_pb2.Sampling(temperature=0)}


async def test_the_five_skills_by_name(serve):
    served = await serve()
    reply = await served.vision.RunSkill(run(**GREEDY))
    typed = await served.vision.Query(
        pb.QueryRequest(images=[raw_image()], query=pb.QueryTask(question="what?", **GREEDY))
    )
    assert reply.output["answer"] == typed.answers[0].text
    same = run(settings={"temperature": 0, "max_tokens": 6})
    assert (await served.vision.RunSkill(same)).output == reply.output
    found = await served.vision.RunSkill(
        run("detect", {"object": "cat"}, settings={"max_objects": 2})
    )
    boxes = await served.vision.Detect(
        pb.DetectRequest(image=raw_image(), detect=pb.DetectTask(objects=["cat"], max_objects=2))
    )
    clipped = [
        {edge: min(1.0, max(0.0, value)) for edge, value in item.items()}
        for item in found.output["objects"]
    ]
    assert [pytest.approx(item, abs=1e-6) for item in clipped] == [
        {edge: getattr(each.box, edge) for edge in ("x_min", "y_min", "x_max", "y_max")}
        | {"score": each.score}
        for each in boxes.detections
    ]
    refs = {"object": "cat", "spatial_refs": [[0.25, 0.5], [0, 0, 1, 1]]}
    assert (await served.vision.RunSkill(run("point", refs))).output["points"]
    two = run("detect", {"object": "cat"}, settings={"max_objects": 2})
    events = [event async for event in stream(served, two)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["detection"] * len(boxes.detections), "final"]
    assert {event.detection.label for event in events[1:-1]} == {"cat"}
    assert [event.sequence for event in events] == list(range(len(events)))
    assert (await served.vision.RunSkill(run(image=False, **GREEDY))).output["answer"]


@pytest.mark.parametrize("family", ["moondream2", "moondream3"])
async def test_an_unknown_skill_is_not_found(serve, family):
    served = await serve(family=family)
    name = "segment" if family == "moondream2" else "dream"
    told = await failure(served.vision.RunSkill(run(name, {"object": "cat"})))
    assert told.code is grpc.StatusCode.NOT_FOUND
    assert (told.reason, told.fields) == ("SKILL_NOT_FOUND", ["skill.name"])
    assert f"{name!r}" in told.message and "query, caption, point, detect" in told.message
    assert (await failure(stream(served, run(name)))).fields == ["skill.name"]


BAD = {
    "no skill": (run(""), "skill.name"),
    "a long name": (run("x" * 129), "skill.name"),
    "a setting out of range": (run(settings={"top_p": 2}), "skill.settings.top_p"),
    "sampling out of range": (run(sampling=common_pb2.Sampling(top_p=2)), "skill.sampling.top_p"),
    "both": (run(settings={"seed": 1}, sampling=common_pb2.Sampling(seed=1)), "skill.settings.seed"),
    "an unknown setting": (run(settings={"depth": 1}), "skill.settings.depth"),
    "text for a number": (run(settings={"max_tokens": "2"}), "skill.settings.max_tokens"),
    "half a token": (run(settings={"max_tokens": 2.5}), "skill.settings.max_tokens"),
    "a number for text": (run(arguments={"question": 7}), "skill.arguments.question"),
    "nothing for text": (run(arguments={"question": None}), "skill.arguments.question"),
    "a ref of three": (run("point", {"object": "cat", "spatial_refs": [[0, 0, 0]]}), "skill.arguments.spatial_refs[0]"),
    "a long prompt": (run(arguments={"question": "x" * 400}), "skill.arguments.question"),
    "too many tokens": (run(settings={"max_tokens": 1000}), "skill.settings.max_tokens"),
    "salt": (run(options=common_pb2.RequestOptions(cache_salt="x" * 129)), "options.cache_salt"),
    "a picture of nothing": (pb.RunSkillRequest(image=common_pb2.Image(), skill=pb.SkillTask(name="query")), "image"),
    "raw pixels too few": (
        pb.RunSkillRequest(
            image=common_pb2.Image(raw=common_pb2.RawImage(data=b"1", width=2, height=2)),
            skill=pb.SkillTask(name="query"),
        ),
        "image.raw.data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
async def test_what_is_wrong_is_told_where_it_stands(serve, case):
    request, field = BAD[case]
    served = await serve()
    told = await failure(served.vision.RunSkill(request))
    assert (told.code, told.fields) == (INVALID, [field])
    assert told.message.startswith(f"{field}: ")
    assert (await failure(stream(served, request))).fields == [field]


async def test_a_skill_that_breaks_down_ends_its_request_alone(serve, plugin, caplog):
    class Broken(type(plugin.get("yes_no"))):
        name = "broken"

        def build(self, arguments, settings, context):
            raise KeyError("secret")

    class Strange(type(plugin.get("yes_no"))):
        name = "strange"

        def new_output(self, request, context):
            output = super().new_output(request, context)
            output.output = lambda: {"what": object()}
            return output

    served = await serve(skills=SkillRegistry([*plugin, Broken(), Strange()]))
    for name in ("broken", "strange"):
        told = await failure(served.vision.RunSkill(run(name)))
        assert told.code is grpc.StatusCode.INTERNAL and "secret" not in told.message
    assert len([r for r in caplog.records if r.exc_info]) == 2
    assert "yes" in (await served.vision.RunSkill(run("yes_no"))).output
    assert served.engine.num_requests == 0


def module(monkeypatch, **attributes):
    made = types.ModuleType("some_plugin")
    vars(made).update(attributes)
    monkeypatch.setitem(__import__("sys").modules, "some_plugin", made)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Skill", "ModuleNotFoundError"),
        ("some_plugin:Absent", "has no attribute 'Absent'"),
        ("some_plugin:Nameless", "name must be a str"),
        ("some_plugin:Half", "lacks new_control, new_output"),
        ("some_plugin:Query", "the skill 'query' is registered twice"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(monkeypatch, name, words):
    whole = {"build": print, "new_control": print, "new_output": print}
    module(
        monkeypatch,
        Nameless=type("Nameless", (), whole),
        Half=type("Half", (), {"name": "half", "build": print}),
        Query=type("Query", (), {"name": "query", **whole}),
    )
    with pytest.raises(SettingsError) as caught:
        skill_registry([name])
    assert f"--skill={name}: " in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)
