"""ObjectTracker, in an environment of its own with the package trackers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.environments import python_with

CLIENT = Path(__file__).parents[2] / "clients/python"
PROGRAM = """
from kestrel_client import Box, DetectResult, ObjectTracker
from kestrel_client.values.geometry import ImageSize
import dataclasses

def found(*lefts):
    fields = {f.name: None for f in dataclasses.fields(DetectResult) if f.init}
    boxes = tuple(Box(x, 0.2, x + 0.2, 0.6, score=0.9) for x in lefts)
    return DetectResult(**{**fields, "object": "cat", "objects": boxes, "image_size": ImageSize(640, 480)})

tracker = ObjectTracker()
seen = [tracker.update(found(0.1 + 0.01 * n, 0.7 - 0.01 * n)) for n in range(8)]
swapped = tracker.update(found(0.62, 0.18))
assert len(set(seen[-1])) == 2 and None not in seen[-1], seen
assert seen[-2] == seen[-1], seen
assert swapped == seen[-1][::-1], (swapped, seen)
assert tracker.update(found()) == ()
print("tracked")
"""


@pytest.mark.slow
def test_objects_keep_their_ids(tmp_path: Path) -> None:
    python = python_with(tmp_path, "trackers>=2.6", str(CLIENT))
    done = subprocess.run(
        [python, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "tracked\n"
