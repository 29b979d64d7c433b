"""Small copies of photographs and emoji, of which draw.py composes pictures.

An archive's files are FOLDER/NUMBER.webp for photographs, and SET/NAME.webp for emoji, NAME without hyphens.
"""

import csv
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from training.domains.photos.names import emoji, others, photographs
from training.sources import drawings

GROCERY, CLOTHING, CARDS, SAMPLES = (
    "GroceryStoreDataset", "clothing-dataset",
    "TensorFlow-Object-Detection-API-Tutorial-Train-Multiple-Objects-Windows-10",
    "cognitive-services-sample-data-files",
)  # fmt: skip
SETS = ("fluent-emoji-flat", "fluent-emoji", "noto", "noto-v1", "fxemoji")
HELD_SET = "fxemoji"
OTHERS = ("Animals & Nature", "Food & Drink", "Activities", "Objects", "Travel & Places")
SIDE, EMOJI_SIDE = 208, 72
# Photographs of a folder: to train with, and for the figures.
MOST = {
    "produce": (80, 5), "cartons": (48, 5), "clothes": (1000, 20), "cards": (100, 8), "others": (20, 20),
    "things": (48, 0),
}  # fmt: skip
Edges = tuple[int, int, int, int]
Found = tuple[str, bool, Path, Edges | None]  # folder, held, file, box


def _groceries(clone: Path) -> Iterator[Found]:
    """The shops of "test" are held out."""
    for use in ("val", "train", "test"):
        for path in sorted((clone / "dataset" / use).glob("**/*.jpg")):
            yield path.parent.name, use == "test", path, None


def _clothes(clone: Path) -> Iterator[Found]:
    """One of seven photographers is held out."""
    with (clone / "images.csv").open(encoding="utf-8") as file:
        for row in sorted(csv.DictReader(file), key=lambda row: row["image"]):
            path = clone / "images" / f"{row['image']}.jpg"
            yield row["label"], int(row["sender_id"]) % 7 == 0, path, None


def _cards(clone: Path) -> Iterator[Found]:
    for use in ("train", "test"):
        with (clone / "images" / f"{use}_labels.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                box = int(row["xmin"]), int(row["ymin"]), int(row["xmax"]), int(row["ymax"])
                yield row["class"], use == "test", clone / "images" / use / row["filename"], box


def _samples(clone: Path) -> Iterator[Found]:
    for path in sorted((clone / "CustomVision").glob("*/Images/*/*.jpg")):
        yield path.parent.name, False, path, None


def _others(clones: Path) -> Iterator[Found]:
    for folder, where, files in others():
        for path in sorted({path for file in files for path in clones.glob(f"{where}/{file}")}):
            yield folder, False, path, None


def _spread(found: Sequence[Found], most: int) -> list[Found]:
    """At most so many, evenly spread, since neighbours look alike."""
    step = max(1.0, len(found) / most)
    return [found[int(i * step)] for i in range(min(most, len(found)))]


def _small(path: Path, box: Edges | None) -> bytes | None:
    try:
        image = Image.open(path).convert("RGB")
    except OSError:
        return None
    image = image.crop(box or (0, 0, *image.size))
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return _webp(image, 45)


def _webp(image: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "WEBP", quality=quality)
    return out.getvalue()


def make_photos(clones: Path, out: Path) -> None:
    """photos.zip and held/photos.zip. clones: the folder of the repositories, each by its own name."""
    names, _ = photographs()
    found: dict[tuple[str, bool], list[Found]] = {}
    readers = (GROCERY, _groceries), (CLOTHING, _clothes), (CARDS, _cards), (SAMPLES, _samples)
    for repository, reader in (*readers, (".", _others)):
        for one in reader(clones / repository):
            if one[0] in names and one[2].exists():
                kept = names[one[0]].kept
                if kept or not (one[1] and not names[one[0]].text):
                    found.setdefault((one[0], kept or one[1]), []).append(one)
    train: dict[str, bytes] = {}
    held: dict[str, bytes] = {}
    for (folder, is_held), photos in sorted(found.items()):
        most = MOST[names[folder].group][is_held]
        smalls = (_small(path, box) for _, _, path, box in _spread(photos, most))
        for number, data in enumerate(filter(None, smalls)):
            (held if is_held else train)[f"{folder}/{number}.webp"] = data
    _write(out, "photos.zip", train, held)


def make_emoji(modules: Path, out: Path) -> None:
    """emojis.zip and held/emojis.zip: the listed ones, and others, of which the figures have a third to themselves.

    Whatever shares a word with a listed emoji is in neither, since it may look the same.
    """
    listed = {key for keys in emoji().values() for key in keys}
    words = {word for key in listed for word in key.split("-")}
    closed = {key.replace("-", "") for key in listed}
    groups = json.loads((modules / "@iconify-json/noto/metadata.json").read_text("utf-8"))[
        "categories"
    ]
    others = {
        key.replace("-", ""): zlib.crc32(key.encode()) % 3 == 0
        for group in OTHERS for key in groups[group] if not words & {*key.split("-")}
    }  # fmt: skip
    train: dict[str, bytes] = {}
    held: dict[str, bytes] = {}
    for each in SETS:
        for key, svg in drawings(modules, each, EMOJI_SIDE):
            plain = key.replace("-", "")
            if plain in closed or others.get(plain) == (each == HELD_SET):
                drawn = _rasterise(svg)
                if drawn is not None:
                    (held if each == HELD_SET else train)[f"{each}/{plain}.webp"] = drawn
    _write(out, "emojis.zip", train, held)


def _write(out: Path, name: str, train: dict[str, bytes], held: dict[str, bytes]) -> None:
    for path, files in ((out / name, train), (out / "held" / name, held)):
        with zipfile.ZipFile(path, "w") as archive:
            for entry, data in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(entry), data)  # without the time


def _rasterise(svg: str) -> bytes | None:
    import pyvips

    picture = pyvips.Image.svgload_buffer(svg.encode())
    if (picture.width, picture.height) != (EMOJI_SIDE, EMOJI_SIDE):
        return None
    return _webp(Image.fromarray(picture.numpy()), 60)
