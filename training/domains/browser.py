"""Chromium draws pictures before the training; each goes to an archive with what it shows (drawn.py reads it)."""

import argparse
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = ["--no-sandbox", "--allow-file-access-from-files", "--disable-background-networking"]


def parse_arguments(doc: str | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--modules", type=Path, required=True, help="folder of node_modules")
    p.add_argument("--count", type=int, default=1000, help="pictures")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--held-out", action="store_true", help="what is for evaluation only")
    p.add_argument("--chromium", default="/usr/bin/chromium")
    p.add_argument("--out", type=Path, required=True, help="folder of the archive")
    return p.parse_args()


def screenshot(page: Page) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


class Archive:
    """``N.webp`` for each picture, and one JSON file with what each shows."""

    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file, self.shown = file, list[dict[str, Any]]()

    def add(self, picture: Image.Image, shown: dict[str, Any]) -> None:
        out = io.BytesIO()
        picture.save(out, "WEBP", quality=50, method=4)
        self._file.writestr(f"{len(self.shown)}.webp", out.getvalue())
        self.shown.append(shown)


Open = tuple[Browser, Archive]


@contextmanager
def drawing(args: argparse.Namespace, archive: str, truth: str) -> Iterator[Open]:
    """An open browser, and the archive that is written to --out when the block ends."""
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play, zipfile.ZipFile(args.out / archive, "w") as file:
        browser = play.chromium.launch(executable_path=args.chromium, args=FLAGS)
        drawn = Archive(file)
        yield browser, drawn
        shown = json.dumps(drawn.shown, separators=(",", ":"))
        file.writestr(truth, shown, zipfile.ZIP_DEFLATED)
        browser.close()
    print(f"{len(drawn.shown)} pictures")
