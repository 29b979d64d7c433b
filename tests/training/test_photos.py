"""Photographs and emoji: what the pictures show is what the answers say; how the archives are made."""

import csv
import io
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from training.domains.photos import pack
from training.domains.photos.names import UNKNOWN, emoji, labels, photographs
from training.learning.batches import LABELS
from training.mixture import draw_picture
from training.prompts import writer


@pytest.mark.parametrize("domain", ["photos", "emoji"])
@pytest.mark.parametrize("held", [False, True])
def test_answers_agree_with_the_marks(domain: str, held: bool, sources: Path) -> None:
    noun = "photo" if domain == "photos" else "emoji"
    unknown = named = 0
    for seed in range(24):
        picture = draw_picture(random.Random(seed), domain, (480, 400), held)
        by_box = {mark.box: mark.label.removeprefix(f"{noun} ") for mark in picture.marks}
        shown = [*by_box.values()]
        for ask in picture.asks:
            if ask.kind == f"{noun} name":
                named += 1
                assert ask.answer in shown and ask.answer != "unknown"
            elif ask.kind == f"{noun} outside":
                unknown += 1
                assert ask.answer == UNKNOWN and "unknown" in shown
            elif ask.kind == f"{noun} which":
                options = ask.text.split(": ")[-1].lower().split("?")[0].split(", ")
                wanted = [name for name in options if name in shown]
                typed = all(f"{noun} {name}" in LABELS for name in options)
                assert not typed or ask.answer == (", ".join(wanted) or "none")
            elif ask.skill in ("detect", "point") and ask.boxes:
                assert len({by_box[box] for box in ask.boxes}) == 1 or len(ask.boxes) == len(shown)
    assert named > 10 and unknown > 3


def test_kept_photographs_are_never_learnt(sources: Path) -> None:
    names, words = photographs()
    assert names["Red-Beet"].kept and not names["Papaya"].kept
    assert (names["Plum"].text, names["Plum"].label, names["Balloon"].label) == (
        "",
        "plum",
        "unknown",
    )
    assert {name.text for name in names.values()} >= set(words)
    oats, plain = names["Oatly-Oat-Milk"], names["Arla-Standard-Milk"]
    assert (oats.text, oats.kind, oats.label) == ("milk", "oat milk", "oat milk")
    assert (plain.text, plain.kind, plain.label) == ("milk", "", "milk")
    listed = {name.text for name in names.values()} - {""}
    assert 45 < len(listed) < 100 and len(emoji()) > 250
    assert all(label in LABELS for label in labels())
    assert all(len(writer().encode(name)) <= 20 for name in (*listed, *emoji()))


def _save(path: Path, colour: tuple[int, int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (300, 200), colour).save(path)


def test_photographs_are_packed_by_shop_and_photographer(tmp_path: Path) -> None:
    groceries = tmp_path / pack.GROCERY / "dataset"
    for use in ("train", "val", "test"):
        for number in range(4):
            _save(groceries / use / "Fruit" / "Banana" / f"{number}.jpg", (200, 200, 60 * number))
            _save(groceries / use / "Vegetables" / "Ginger" / f"{number}.jpg", (90, 80, 70))
            _save(groceries / use / "Vegetables" / "Red-Beet" / f"{number}.jpg", (90, 0, 70))
    clothes = tmp_path / pack.CLOTHING
    cards = tmp_path / pack.CARDS / "images"
    for name in "ab":
        _save(clothes / "images" / f"{name}.jpg", (0, 90, 200))
    rows = "image,sender_id,label,kids\na,7,Hoodie,False\nb,8,Hoodie,False\nlost,8,Hoodie,False\n"
    (clothes / "images.csv").write_text(rows)
    for use in ("train", "test"):
        _save(cards / use / "one.jpg", (250, 250, 250))
        line = ["one.jpg", 300, 200, "ace", 10, 20, 60, 120]
        with (cards / f"{use}_labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [["filename", "width", "height", "class", "xmin", "ymin", "xmax", "ymax"], line]
            )
    _save(tmp_path / "shared-assets" / "images" / "examples" / "balloon.jpg", (9, 90, 200))
    made = []
    for out in (tmp_path / "one", tmp_path / "two"):
        (out / "held").mkdir(parents=True)
        pack.make_photos(tmp_path, out)
        made.append([(out / name).read_bytes() for name in ("photos.zip", "held/photos.zip")])
    assert made[0] == made[1]
    files = [zipfile.ZipFile(io.BytesIO(data)) for data in made[0]]
    counts = [{name.split("/")[0] for name in file.namelist()} for file in files]
    assert counts == [
        {"Balloon", "Banana", "Ginger", "Hoodie", "ace"},
        {"Banana", "Red-Beet", "Hoodie", "ace"},
    ]
    assert sum("Banana" in name for name in files[0].namelist()) == 8
    assert sum("Hoodie" in name for name in files[1].namelist()) == 1
    with files[0].open("ace/0.webp") as file:
        assert Image.open(file).size == (50, 100)


def test_emoji_are_packed_by_set(tmp_path: Path) -> None:
    modules = tmp_path / "@iconify-json"
    body = '<path fill="#f00" d="M4 4h24v24H4z"/>'
    for each in pack.SETS:
        (modules / each).mkdir(parents=True)
        icons = {
            name: {"body": body}
            for name in ("cat-face", "dango", "abacus", "crayon", "cat-with-hat")
        }
        (modules / each / "icons.json").write_text(
            json.dumps({"icons": icons, "width": 32, "height": 32})
        )
    groups = {
        group: ["cat-face", "dango", "abacus", "crayon", "cat-with-hat"] for group in pack.OTHERS
    }
    (modules / "noto" / "metadata.json").write_text(json.dumps({"categories": groups}))
    (tmp_path / "held").mkdir()
    # The engine blocks SVG in its own process.
    program = (
        "import pathlib, sys; from training.domains.photos.pack import make_emoji\n"
        "make_emoji(*map(pathlib.Path, sys.argv[1:]))"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path, tmp_path], check=True)
    train, held = (
        {*zipfile.ZipFile(tmp_path / name).namelist()} for name in ("emojis.zip", "held/emojis.zip")
    )
    assert "noto/catface.webp" in train and "fxemoji/catface.webp" in held
    words = [{name.split("/")[1] for name in names} for names in (train, held)]
    assert words[0] & words[1] == {"catface.webp"}
    assert words[0] | words[1] == {"catface.webp", "dango.webp", "abacus.webp", "crayon.webp"}
