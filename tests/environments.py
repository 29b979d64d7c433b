"""Environments of their own for programs of packages that tests must not import."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def python_with(folder: Path, *packages: str) -> Path:
    """The interpreter of a new environment in ``folder`` with ``packages``. Skips the test if one can't be installed.

    A package is a requirement, with pip's options before it. The environment has no pip of its own, and only modules
    that a program imports are compiled: both would take longer than most programs. For the same reason what the tests'
    own environment has is not installed again, unless another version is needed."""
    new_environment = [sys.executable, "-m", "venv", "--without-pip", folder / "env"]
    subprocess.run(new_environment, check=True, timeout=120)
    python = folder / "env/bin/python"
    paths = sysconfig.get_paths(vars={"base": str(folder / "env"), "platbase": str(folder / "env")})
    Path(paths["purelib"], "outer.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    for package in packages:
        installed = subprocess.run([*install, *package.split()], timeout=300, check=False)
        if installed.returncode:
            pytest.skip(f"{package} can't be installed here")
    return python


def python_named(variable: str, package: str) -> Path:
    """The interpreter that an environment variable names, for a package that is too large to be installed for a test.
    Skips the test without it."""
    named = os.environ.get(variable)
    if not named:
        pytest.skip(
            f"{package} is large: {variable} may name a Python that has it and kestrel-client"
        )
    return Path(named)


def printed(*command: object, cwd: Path | None = None, **variables: str) -> str:
    """What the program prints. Fails unless it ends with status 0."""
    words, environment = [*map(str, command)], {**os.environ, **variables}
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout
