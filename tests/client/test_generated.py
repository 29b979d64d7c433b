"""The synchronous clients are the asynchronous ones without await; ``make check`` compares the files."""

import inspect

import pytest

from kestrel_client import AsyncKestrelAdmin, AsyncKestrelClient, KestrelAdmin, KestrelClient


@pytest.mark.parametrize(
    ("sync", "asynchronous"),
    [(KestrelClient, AsyncKestrelClient), (KestrelAdmin, AsyncKestrelAdmin)],
)
def test_methods_are_the_same(sync: type, asynchronous: type) -> None:
    def methods(kind: type) -> dict[str, tuple[list[str], str | None]]:
        return {
            name.removeprefix("a") if name == "aclose" else name: (
                list(inspect.signature(method).parameters),
                inspect.getdoc(method),
            )
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(sync) == methods(asynchronous) and len(methods(sync)) >= 10
    assert all(doc for _, doc in methods(sync).values())
