from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kestrel_engine.types.requests import PreparedImage
from tests.golden.checkpoint import DATA
from tests.golden.goldens import Golden, load_golden, load_pictures


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread an operator: on a machine that does other work, many small parallel regions wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pictures() -> dict[str, PreparedImage]:
    return load_pictures()


@pytest.fixture(scope="session")
def goldens(
    golden_folder: Callable[[str], Path], pictures: dict[str, PreparedImage]
) -> Callable[[str], Golden]:
    """From "md2" or "md3" to the golden model, loaded once a session, its images encoded."""
    loaded: dict[str, Golden] = {}

    def get(name: str) -> Golden:
        if name not in loaded:
            loaded[name] = load_golden(name, golden_folder(name), DATA, pictures)
        return loaded[name]

    return get


@pytest.fixture(params=["md2", "md3"])
def golden(request: pytest.FixtureRequest, goldens: Callable[[str], Golden]) -> Golden:
    return goldens(request.param)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
