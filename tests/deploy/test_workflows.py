"""The workflows of .github: the actions that they use, their permissions, and the files that they run."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = ROOT / ".github/workflows/release.yml"


def content(path):
    return yaml.safe_load(path.read_text())


def steps(path):
    return [(name, s) for name, job in content(path)["jobs"].items() for s in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_jobs_have_bounds(path):
    used = re.findall(r"uses: *(.*)", path.read_text())
    assert used
    for each in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each), each
    assert content(path)["permissions"] == {"contents": "read"}
    assert all(0 < job["timeout-minutes"] <= 90 for job in content(path)["jobs"].values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_they_run_is_there(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [line for _, step in steps(path) for line in step.get("run", "").splitlines()]
    for command in commands:
        if command.startswith("make "):
            assert command.split()[1] in targets, command
        if command.startswith(".ci/"):
            assert (ROOT / command.split()[0]).stat().st_mode & 0o100, command
    assert commands


def test_a_release_needs_no_secret_and_each_job_may_do_its_own_work_only():
    jobs = content(RELEASE)["jobs"]
    assert "secrets." not in RELEASE.read_text()
    writes = {
        name: {what for what, how in job.get("permissions", {}).items() if how == "write"}
        for name, job in jobs.items()
    }
    assert writes == {
        "test": set(),
        "build": {"id-token", "attestations"},
        "pypi": {"id-token"},
        "npm": {"id-token"},
        "images": {"packages"},
        "page": {"contents"},
    }
    for name in ("pypi", "npm"):
        assert jobs[name]["environment"] == name
    for name in ("pypi", "npm", "images"):
        assert {"test", "build"} <= set(jobs[name]["needs"]) and name in jobs["page"]["needs"]
    # What a caller of the workflow controls never becomes part of a command.
    assert not [s for _, s in steps(RELEASE) if "${{" in s.get("run", "")]
    images = {row["file"] for row in jobs["images"]["strategy"]["matrix"]["include"]}
    assert images == {f"deploy/{path.name}" for path in (ROOT / "deploy").glob("Dockerfile*")}
