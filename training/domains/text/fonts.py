"""Fonts of the data folder: KESTREL_SOURCES, by default out/sources (training/sources.py makes it)."""

import io
import os
import random
import zipfile
from functools import cache, lru_cache
from pathlib import Path

from PIL import ImageFont


def sources() -> Path:
    return Path(os.environ.get("KESTREL_SOURCES", "out/sources"))


@cache
def _files() -> dict[str, bytes]:
    with zipfile.ZipFile(sources() / "fonts.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@cache
def font_names(held: bool) -> tuple[str, ...]:
    use = "held/" if held else "train/"
    return tuple(sorted(name for name in _files() if name.startswith(use)))


def draw_font(rng: random.Random, held: bool) -> str:
    return rng.choice(font_names(held))


@lru_cache(maxsize=400)
def load(name: str, size: int) -> ImageFont.FreeTypeFont:
    data = io.BytesIO(_files()[name])
    return ImageFont.truetype(data, size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=60_000)
def advance(name: str, size: int, character: str) -> float:
    return load(name, size).getlength(character)
