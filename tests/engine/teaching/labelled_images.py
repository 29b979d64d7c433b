"""``data``: a folder of labelled images, and beside it a folder of adapters."""

import json
from pathlib import Path

import pytest

SIDE = 120


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four images with a question each, and a folder of adapters."""
    pyvips = pytest.importorskip("pyvips")
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "adapters").mkdir()
    lines = []
    for index in range(4):
        image = pyvips.Image.black(SIDE, SIDE, bands=3).linear(
            1, [40 * index, 90, 200 - 40 * index]
        )
        image.cast("uchar").copy(interpretation="srgb").write_to_file(str(folder / f"{index}.png"))
        lines.append({"image": f"{index}.png", "question": "Who made it?", "answer": "Ada"})
        lines.append({"image": f"{index}.png", "object": "wall", "boxes": [[0, 0, 1, 1]]})
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
