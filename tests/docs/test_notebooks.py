"""The notebooks of docs/notebooks: they run, and what they show is what they give."""

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kestrel_client.commands.own_server import own_server
from tests.code_blocks import ROOT
from tests.environments import printed, python_with

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
LARGEST = 400_000
"""Bytes of a notebook with its images."""


def outputs(path: Path) -> Iterator[dict[str, Any]]:
    for cell in json.loads(path.read_text())["cells"]:
        yield from cell.get("outputs", ())


def texts(path: Path) -> list[str]:
    """What is printed, and the words of results. Tables depend on the version of pandas."""
    said = []
    for output in outputs(path):
        shown = output.get("data", {})
        if "text/html" not in shown:
            said.append("".join(output.get("text") or shown["text/plain"]))
    return said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_small_images_and_no_error(path: Path):
    assert path.stat().st_size < LARGEST and str(ROOT.parent) not in path.read_text()
    assert len(texts(path)) > 5
    images = 0
    for output in outputs(path):
        assert (
            output["output_type"] in ("stream", "execute_result") and output.get("name") != "stderr"
        )
        for kind in ("image/png", "image/jpeg"):
            if kind in output.get("data", {}):
                Image.open(BytesIO(base64.b64decode(output["data"][kind]))).verify()
                images += 1
    assert images > 3


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_gives_what_it_shows(path: Path, tmp_path: Path):
    python = python_with(tmp_path, "nbclient>=0.10 ipykernel>=6")
    with own_server(["--model", "kestrel-small", "--precision", "float32"]) as (address, _):
        printed(
            *(python, ROOT / "tests/docs/run_notebook.py", path, tmp_path / "ran.ipynb"),
            KESTREL_SERVER=address,
            PYTHONPATH=str(ROOT / "clients/python"),
            JUPYTER_PLATFORM_DIRS="1",
            IPYTHONDIR=str(tmp_path / "ipython"),
        )
    # A stream of outputs may come in several pieces.
    assert "".join(texts(tmp_path / "ran.ipynb")) == "".join(texts(path))
