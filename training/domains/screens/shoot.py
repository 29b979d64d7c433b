"""Draw random pages in Chromium and keep each with its elements.

    python -m training.domains.screens.shoot --modules out/kits/node_modules --pages 1000 --out out/screens

The folder of node_modules must hold the packages of pages.THEMES and pages.FONTS and an icon set of @iconify-json. The
result is a file ``screens.zip`` with ``N.webp`` and one ``pages.json``: for each page its theme and its elements, each
with role, name, box in pixels and what else the page says of it.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from training.domains.screens.pages import THEMES, THEMES_HELD_OUT, make_page

ICONS = (
    "home user users search settings bell star heart trash pencil plus minus check x mail phone camera calendar clock "
    "lock key cloud sun moon map flag bookmark download upload share printer folder file link music microphone volume "
    "video battery wifi bluetooth shield gift shopping-cart credit-card tag filter eye refresh"
).split()

MIN_CONTRAST = 60
"""Levels of grey of 255 between an element's darkest and lightest pixel."""

LOOK = Path(__file__).parent / "look.js"


def read_icons(modules: Path, collection: str) -> dict[str, str]:
    """Names to SVG documents that take the colour of the text."""
    data = json.loads((modules / "@iconify-json" / collection / "icons.json").read_text())
    width, height = data.get("width", 16), data.get("height", 16)
    out = {}
    for name in ICONS:
        icon = data["icons"].get(name)
        if icon is not None:
            box = f"0 0 {icon.get('width', width)} {icon.get('height', height)}"
            out[name.replace("-", " ")] = (
                f'<svg viewBox="{box}" xmlns="http://www.w3.org/2000/svg">{icon["body"]}</svg>'
            )
    return out


def shoot(
    page: Page, seed: int, theme: str, icons: dict[str, str], modules: Path
) -> tuple[bytes, list[dict[str, Any]]]:
    """One page as WebP, and its elements that are wholly visible."""
    text, width, height = make_page(seed, theme, icons, modules.resolve().as_uri())
    page.set_viewport_size({"width": width, "height": height})
    place = modules / "page.html"
    place.write_text(text)
    page.goto(place.resolve().as_uri(), wait_until="load")
    elements = page.evaluate(LOOK.read_text())
    # A page ends some pixels below its last element, and often beside it, so that little of a picture is empty.
    bottom = page.evaluate(
        "Math.min(innerHeight, Math.max(200, document.body.getBoundingClientRect().bottom + 16))"
    )
    right = max((e["box"][2] for e in elements), default=0) + 30 if seed % 2 else width
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture = picture.crop((0, 0, int(min(width, max(right, 300))), int(bottom)))
    out = io.BytesIO()
    picture.save(out, "WEBP", quality=85, method=4)
    grey = picture.convert("L")
    kept = [e for e in elements if e["box"][3] <= bottom and is_visible(grey, e["box"])]
    return out.getvalue(), kept


def is_visible(grey: Image.Image, box: list[float]) -> bool:
    """False where a theme's colours hide an element, like white text on a white page."""
    low, high = grey.crop((int(box[0]), int(box[1]), int(box[2]) + 1, int(box[3]) + 1)).getextrema()
    return int(high) - int(low) >= MIN_CONTRAST


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--modules", type=Path, required=True, help="folder of node_modules")
    p.add_argument("--icons", default="tabler", help="icon set of @iconify-json")
    p.add_argument("--pages", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--held-out", action="store_true", help="pages of the themes for evaluation")
    p.add_argument("--chromium", default="/usr/bin/chromium")
    p.add_argument("--out", type=Path, required=True, help="folder of screens.zip")
    args = p.parse_args()
    themes = [t for t in THEMES if (t in THEMES_HELD_OUT) == args.held_out]
    icons = read_icons(args.modules, args.icons)
    r = random.Random(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    pages = []
    with (
        sync_playwright() as play,
        zipfile.ZipFile(args.out / "screens.zip", "w", zipfile.ZIP_STORED) as archive,
    ):
        flags = [
            "--no-sandbox",
            "--allow-file-access-from-files",
            "--disable-background-networking",
        ]
        browser = play.chromium.launch(executable_path=args.chromium, args=flags)
        page = browser.new_page()
        for number in range(args.pages):
            theme = r.choice(themes)
            data, elements = shoot(page, args.seed * 1_000_000 + number, theme, icons, args.modules)
            if len(elements) >= 3:
                archive.writestr(f"{len(pages)}.webp", data)
                pages.append({"theme": theme, "elements": elements})
        archive.writestr("pages.json", json.dumps(pages, separators=(",", ":")))
        browser.close()
    print(f"{len(pages)} pages")


if __name__ == "__main__":
    main()
