"""The Python of README and docs passes type checkers, as a user runs them: strictly, with the packages' own types."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.code_blocks import PAGES, ROOT, Block, code_blocks
from tests.environments import python_with

BLOCKS = [block for page in PAGES for block in code_blocks(page)]
CLIENT = re.compile(r"^\s*(?:from|import) kestrel_client", re.MULTILINE)
ENGINE = re.compile(r"^\s*(?:from|import) kestrel_engine", re.MULTILINE)


def written(folder: Path, blocks: Sequence[Block]) -> list[str]:
    """The names of the files that hold the blocks."""
    names = []
    for block in blocks:
        name = re.sub(r"\W", "_", str(block)) + ".py"
        (folder / name).write_text(block.text)
        names.append(name)
    return names


def using(package: re.Pattern[str]) -> list[Block]:
    """The blocks that are programs: their first line imports, or is their docstring."""
    begins = re.compile(r'(from|import) \w+|"""')
    return [b for b in BLOCKS if package.search(b.text) and begins.match(b.text)]


def mypy(folder: Path, *words: str | Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", *words]
    # Outside of the checkout: neither its settings nor its folders are a user's.
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_blocks_of_the_client_pass_mypy(tmp_path: Path) -> None:
    blocks = using(CLIENT)
    assert len(blocks) > 25
    mypy(tmp_path, *written(tmp_path, blocks))


@pytest.mark.slow
def test_blocks_of_the_engine_pass_mypy(tmp_path: Path) -> None:
    """Slow, because mypy reads torch. The plug-in of docs/develop/skills.md is among them."""
    blocks = using(ENGINE)
    assert any("class YesNoSkill" in block.text for block in blocks)
    mypy(tmp_path, *written(tmp_path, blocks))


def pyright(python: Path, folder: Path, files: Sequence[str | Path], **settings: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [python.parent / "pyright", "--pythonpath", sys.executable, *files]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_client_and_blocks_pass_pyright(tmp_path: Path) -> None:
    """Slow, because it installs pyright, which runs Node."""
    python = python_with(tmp_path / "packages", "pyright[nodejs]>=1.1.400,<2")
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    pyright(python, blocks, written(blocks, using(CLIENT)), typeCheckingMode="strict")
    package = (ROOT / "clients/python/kestrel_client").rglob("*.py")
    sources = [path for path in package if "_pb" not in path.parts]
    # supervision and pandas are optional.
    pyright(python, tmp_path / "client", sources, reportMissingImports=False)
