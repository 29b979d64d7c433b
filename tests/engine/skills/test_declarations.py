"""What the skills declare: the names that they read, no more and no fewer."""

import json

import pytest

from kestrel_engine import ConfigError
from kestrel_engine.errors import InvalidRequest
from kestrel_engine.skills import CaptionSkill, SkillRegistry
from kestrel_engine.skills.declaration import describe, names_of, object_schema


@pytest.mark.parametrize("skill", [*SkillRegistry.default()], ids=lambda skill: skill.name)
def test_all_declared_names_are_read_and_no_others(skill, moondream3):
    for part, declared in (("arguments", skill.arguments), ("settings", skill.settings)):
        for name in (*names_of(declared), "nothing"):
            given = {
                "arguments": dict.fromkeys(skill.arguments.get("required", ()), "x"),
                "settings": {},
            }
            given[part][name] = object()
            with pytest.raises(InvalidRequest) as caught:
                skill.build(given["arguments"], given["settings"], moondream3)
            is_unknown = "this skill; known: " in caught.value.message
            assert is_unknown == (name == "nothing"), (part, name, caught.value)


def test_only_texts_have_settings_of_text_and_only_objects_a_threshold():
    of_text = {"stop", "logprobs", "top_logprobs", "presence_penalty", "logit_bias", "constraint"}
    for skill in SkillRegistry.default():
        is_text = skill.name in ("query", "caption")
        assert names_of(skill.settings) & of_text == (of_text if is_text else set())
        assert ("min_score" in names_of(skill.settings)) == (not is_text and skill.name != "gaze")


def test_a_skill_that_declares_nothing_has_an_open_schema():
    class Undeclared:
        name = "undeclared"

    told = describe(Undeclared())
    parts = json.loads(told.schema)["properties"]
    assert parts == {"arguments": {"type": "object"}, "settings": {"type": "object"}}


def test_what_is_not_json_is_refused_at_once():
    class Broken(CaptionSkill):
        name = "broken"
        arguments = object_schema({"length": object()})

    with pytest.raises(ConfigError, match="not JSON"):
        SkillRegistry([Broken()])
