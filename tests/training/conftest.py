"""Fixtures of the training tests: one torch thread, kestrel-tiny's prompts, images as the engine sees them."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from tests.tiny import TINY
from training.prompts import PromptWriter
from training.sources import HELD_SET, ICON_SETS, icon_names


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def writer() -> PromptWriter:
    return PromptWriter.of(TINY)


def _photographs(folder: Path) -> None:
    """Archives with one coloured square for each name: the listed ones, and others."""
    (folder / "held").mkdir()
    outside = {"photo": ("Papaya/0", "Red-Beet/0"), "emoji": ("noto/dango", "noto/abacus")}
    listed = {"photo": ("Banana/0", "Kaiser/0", "Arla-Standard-Milk/0", "Hoodie/0", "ace/0"),
              "emoji": ("noto/cat", "noto/babychick", "noto/pizza", "noto/rocket", "noto/robot")}  # fmt: skip
    for noun, names in listed.items():
        for number, path in enumerate((f"{noun}s.zip", f"held/{noun}s.zip")):
            with zipfile.ZipFile(folder / path, "w") as archive:
                for shade, name in enumerate((*names, outside[noun][number])):
                    square = Image.new(
                        "RGBA", (40, 30), (40 * shade, 255 - 40 * shade, 90 * number, 255)
                    )
                    ImageDraw.Draw(square).ellipse((5, 5, 25, 25), fill=(200, 30, 40 * shade, 255))
                    out = io.BytesIO()
                    square.save(out, "WEBP", lossless=True)
                    archive.writestr(f"{name}.webp", out.getvalue())


@pytest.fixture
def sources(source_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of this test alone: `serve` names a variable that is no setting."""
    monkeypatch.setenv("KESTREL_SOURCES", str(source_files))
    return source_files


@pytest.fixture(scope="session")
def source_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data folder in place of that of training/sources.py: Pillow's own font, drawn icons, a few words."""
    folder = tmp_path_factory.mktemp("sources")
    data = ImageFont.load_default(20).font_bytes  # type: ignore[union-attr]
    with zipfile.ZipFile(folder / "fonts.zip", "w") as archive:
        archive.writestr("train/plain-400-normal.ttf", data)
        archive.writestr("held/plain-400-normal.ttf", data)
    masks, names, sets = [], [], []
    for number, name in enumerate(list(icon_names())[:8]):
        mask = Image.new("L", (64, 64))
        ImageDraw.Draw(mask).regular_polygon((32, 32, 24), 3 + number, fill=255)
        for each in (0, ICON_SETS.index(HELD_SET)):
            masks.append(np.asarray(mask))
            names.append(name)
            sets.append(each)
    np.savez(folder / "icons.npz", masks=np.stack(masks), names=names, sets=np.array(sets))
    letters = "abcdefghijklmnopqrst"
    words = [letters[i : i + n] for n in range(3, 8) for i in range(13)]
    (folder / "words.txt").write_text("\n".join(words), encoding="utf-8")
    _photographs(folder)
    return folder
