"""The synchronous clients are the asynchronous ones without await."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_client import AsyncKestrelAdmin, AsyncKestrelClient, KestrelAdmin, KestrelClient

SCRIPT = Path(__file__).parents[2] / "clients/python/generate_sync.py"


def test_up_to_date() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert not done.returncode, done.stderr


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
