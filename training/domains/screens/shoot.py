"""Draw random pages in Chromium and keep each with its elements.

    python -m training.domains.screens.shoot --modules out/kits/node_modules --count 1000 --out out/screens

The folder of node_modules must hold the packages of pages.THEMES and pages.FONTS, and @iconify-json/tabler. The
result is a file ``screens.zip`` with ``N.webp`` and one ``pages.json``: for each page its theme and its elements, each
with role, name, box in pixels and what else the page says of it.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from playwright.sync_api import Page

from training.domains.browser import drawing, parse_arguments, screenshot
from training.domains.screens.pages import ICONS, THEMES, THEMES_HELD_OUT, make_page

ICON_SET = "tabler"
MIN_CONTRAST = 60
"""Levels of grey of 255 between an element's darkest and lightest pixel."""
LOOK = Path(__file__).parent / "look.js"


def read_icons(modules: Path, collection: str) -> dict[str, str]:
    """Names to SVG documents that take the colour of the text."""
    data = json.loads((modules / "@iconify-json" / collection / "icons.json").read_text())
    out = {}
    for name in (name for name in ICONS if name in data["icons"]):
        icon = {"width": 16, "height": 16, **data, **data["icons"][name]}
        opening = f'<svg viewBox="0 0 {icon["width"]} {icon["height"]}" xmlns="http://www.w3.org/2000/svg">'
        out[name.replace("-", " ")] = f"{opening}{icon['body']}</svg>"
    return out


def shoot(
    page: Page, seed: int, theme: str, icons: dict[str, str], modules: Path
) -> tuple[Image.Image, list[dict[str, Any]]]:
    """One page, and its elements that are wholly visible."""
    text, width, height = make_page(seed, theme, icons, modules.resolve().as_uri())
    page.set_viewport_size({"width": width, "height": height})
    place = modules / "page.html"
    place.write_text(text)
    page.goto(place.resolve().as_uri(), wait_until="load")
    elements = page.evaluate(LOOK.read_text())
    # A page ends some pixels below its last element, and often beside it, so that little of a picture is empty.
    lowest = "document.body.getBoundingClientRect().bottom + 16"
    bottom = page.evaluate(f"Math.min(innerHeight, Math.max(200, {lowest}))")
    right = max((e["box"][2] for e in elements), default=0) + 30 if seed % 2 else width
    picture = screenshot(page).crop((0, 0, int(min(width, max(right, 300))), int(bottom)))
    grey = picture.convert("L")
    kept = [e for e in elements if e["box"][3] <= bottom and is_visible(grey, e["box"])]
    return picture, kept


def is_visible(grey: Image.Image, box: list[float]) -> bool:
    """False where a theme's colours hide an element, like white text on a white page."""
    edges = int(box[0]), int(box[1]), int(box[2]) + 1, int(box[3]) + 1
    return int(np.ptp(np.asarray(grey.crop(edges)))) >= MIN_CONTRAST


def main() -> None:
    args = parse_arguments(__doc__)
    themes = [t for t in THEMES if (t in THEMES_HELD_OUT) == args.held_out]
    icons = read_icons(args.modules, ICON_SET)
    r = random.Random(args.seed)
    with drawing(args, "screens.zip", "pages.json") as (browser, archive):
        page = browser.new_page()
        for number in range(args.count):
            theme = r.choice(themes)
            seed = args.seed * 1_000_000 + number
            picture, elements = shoot(page, seed, theme, icons, args.modules)
            if len(elements) >= 3:
                archive.add(picture, {"theme": theme, "elements": elements})


if __name__ == "__main__":
    main()
