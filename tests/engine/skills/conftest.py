"""A byte-level codec (id = 100 + byte; ids below 100 are special) and contexts of both model families."""

import pytest

from kestrel_engine.skills.base import SkillContext, SkillDefaults
from kestrel_engine.types.model_config import ModelConfig, parse_model_config
from tests.engine.fakes import ByteCodec


def context_of(model: ModelConfig, **defaults: object) -> SkillContext:
    return SkillContext(model=model, codec=ByteCodec(), defaults=SkillDefaults(**defaults))  # type: ignore[arg-type]


@pytest.fixture
def moondream2() -> SkillContext:
    return context_of(parse_model_config({}, family="moondream2"))


@pytest.fixture
def moondream3() -> SkillContext:
    return context_of(parse_model_config({}, family="moondream3"))


@pytest.fixture
def codec() -> ByteCodec:
    return ByteCodec()
