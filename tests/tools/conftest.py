"""A server with the bundled model, for tools that ask it."""

from collections.abc import Iterator

import pytest

from tests.service.cli.serve_process import served_model


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Its address."""
    with served_model() as addresses:
        yield addresses.grpc
