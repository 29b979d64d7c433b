"""Every input of the corpus passes. Among them are the inputs that fuzzing found faults with."""

import importlib

import pytest

from .__main__ import CORPUS, TARGETS
from .measured import TooSlow, within_limits


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name: str) -> None:
    take = within_limits(importlib.import_module(f"tests.fuzz.targets.{name}").take)
    inputs = sorted((CORPUS / name).iterdir())
    assert inputs
    for file in inputs:
        try:
            take(file.read_bytes())
        except BaseException as error:
            error.add_note(str(file))
            raise


def test_a_slow_input_is_told() -> None:
    with pytest.raises(TooSlow):
        within_limits(lambda data: print(sum(range(len(data)))), slowdown=1e-6)(bytes(10_000))
