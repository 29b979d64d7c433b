"""Thousands of broken images in a process with bounded memory. KESTREL_FUZZ_IMAGES: how many the slow test decodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrel_engine.preprocess.decoding.open_image import IMAGE_FORMATS
from tests.abuse.inputs import mutated_images

ROOT = Path(__file__).parents[3]
COUNT = int(os.environ.get("KESTREL_FUZZ_IMAGES", "400"))


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.abuse.inputs.mutated_images", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s)


def fuzz(*arguments: str, timeout_s: float) -> dict:
    done = run(*arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_every_format_has_seeds():
    """HEIC is read by few builds of libvips, and written by none that we have."""
    assert set(IMAGE_FORMATS) - {"HEIC"} == set(mutated_images.seeds())


def test_a_number_is_a_image():
    formats = mutated_images.seeds()
    name, data = mutated_images.image(1, 7, formats)
    assert mutated_images.image(1, 7, formats) == (name, data)
    assert data not in formats[name]


@pytest.mark.parametrize("count", [40, pytest.param(COUNT, marks=pytest.mark.slow)])
def test_mutated_images_crash_nothing_and_hang_nowhere(count: int):
    found = fuzz("--count", str(count), timeout_s=60 + count)
    assert found["faults"] == []
    assert sum(found["taken"].values()) > count / 10, "some are still images"
    assert sum(found["refused"].values()) > count / 10
    assert found["peak_mib"] < 512


@pytest.mark.slow
def test_memory_is_bounded_in_earnest():
    """The bound holds: with next to no memory the process can't even begin."""
    assert run("--count", "1", "--memory-mib", "64").returncode != 0
