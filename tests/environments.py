"""Environments of their own for programs of packages that tests must not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def python_with(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment in ``folder`` with ``packages``. Skips the test if one can't be installed.

    A package is a requirement, with pip's options before it."""
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True, timeout=120)
    python = folder / "env/bin/python"
    for package in packages:
        installed = subprocess.run(
            [python, "-m", "pip", "install", "-q", *package.split()], timeout=300, check=False
        )
        if installed.returncode:
            pytest.skip(f"{package} can't be installed here")
    return python
