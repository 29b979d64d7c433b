"""A byte-level codec (id = 100 + byte; ids below 100 are special) and contexts of both model families."""

import pytest

from kestrel_engine.skills.base import SkillContext, SkillDefaults
from kestrel_engine.types.model_config import ModelConfig, parse_model_config


class ByteCodec:
    def encode(self, text: str) -> list[int]:
        return [100 + byte for byte in text.encode()]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return bytes(i - 100 for i in ids if i >= 100).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id - 100]) if token_id >= 100 else b""


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
