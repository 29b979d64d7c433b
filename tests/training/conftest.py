"""Fixtures of the training tests: one torch thread, the bundled files, evaluation images as the engine sees them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kestrel_grpc.scenes.evaluation_set import encode, example
from training.prompts import PromptWriter

BUNDLED = Path(__file__).parents[2] / "kestrel_engine" / "bundled" / "kestrel_tiny"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def bundled() -> Path:
    return BUNDLED


@pytest.fixture(scope="session")
def writer() -> PromptWriter:
    return PromptWriter.bundled()


@pytest.fixture(scope="session")
def picture() -> Callable[[int], bytes]:
    """The encoded file of an example of the seen slice."""
    pytest.importorskip("pyvips")
    return lambda index: encode(example("seen", index))
