"""Draw random charts with plotting libraries for browsers and keep each with its table.

    python -m training.domains.charts.shoot --modules out/kits/node_modules --count 1000 --out out/charts

The folder of node_modules must hold the packages of LIBRARIES. The result is ``charts.zip`` with ``N.webp`` and one
``charts.json``: for each chart its library and its table (see tables.py). Charts of the libraries HELD_OUT are for
evaluation only.
"""

import random
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page

from training.domains.browser import drawing, parse_arguments, screenshot
from training.domains.charts.tables import FONTS, make_table

LIBRARIES = {
    "echarts": ("echarts/dist/echarts.min.js",),
    "chartjs": ("chart.js/dist/chart.umd.min.js",),
    "billboard": ("billboard.js/dist/billboard.pkgd.min.js",),
    "plotly": ("plotly.js-dist-min/plotly.min.js",),
    "vega": tuple(f"{name}/build/{name}.min.js" for name in ("vega", "vega-lite", "vega-embed")),
}
"""Library to scripts, below node_modules. Apache-2.0 (echarts), BSD-3-Clause (vega), MIT (the rest)."""

DRAW = Path(__file__).parent / "libraries.js"
HELD_OUT = ("plotly", "vega")


def open_page(browser: Browser, library: str, modules: Path) -> Page:
    """An empty page that has the scripts of a library."""
    scripts = [(modules / script).resolve().as_uri() for script in LIBRARIES[library]]
    files = [f'<script src="{url}"></script>' for url in scripts]
    files.append(f"<script>{DRAW.read_text()}</script>")
    if library == "billboard":
        sheet = modules / "billboard.js/dist/billboard.min.css"
        files.append(f'<link rel=stylesheet href="{sheet.resolve().as_uri()}">')
    folder = (modules / "@fontsource").resolve().as_uri()
    for font in FONTS[3:]:
        url = f"{folder}/{font}/files/{font}-latin-400-normal.woff2"
        files.append(f"<style>@font-face{{font-family:{font};src:url({url})}}</style>")
    if library not in HELD_OUT:
        files.append("<style>#c text{font:inherit!important;fill:currentColor!important}</style>")
    place = modules / f"chart-{library}.html"
    body = "<body style='margin:0'><div id=h></div></body>"
    place.write_text(f"<!doctype html><meta charset=utf-8>{''.join(files)}{body}")
    page = browser.new_page()
    page.goto(place.resolve().as_uri(), wait_until="load")
    return page


def draw_chart(
    page: Page, library: str, table: dict[str, Any]
) -> tuple[Image.Image, dict[str, Any]]:
    """The picture, and where its texts and values are (libraries.js)."""
    page.set_viewport_size({"width": table["width"], "height": table["height"]})
    back, ink = ("#222", "#ddd") if table["dark"] else ("#fff", "#222")
    style = f"background:{back};color:{ink};font-family:{table['font']};font-size:{table['size']}px"
    page.evaluate(f"""document.body.style.cssText = 'margin:0;{style}';
        document.getElementById('h').innerHTML = '<div id=c></div>'""")
    page.evaluate(
        """async ([library, table]) => { TEXTS = []; PLACES = () => [];
        await document.fonts.load(`16px ${table.font}`); await DRAW[library](table); }""",
        [library, table],
    )
    page.wait_for_timeout(30)
    return screenshot(page), page.evaluate("shown()")


def is_whole(table: dict[str, Any], texts: list[Any]) -> bool:
    """False where the picture's edge cuts the title, a label or a series' name."""
    asked = {table["title"], *table["labels"], *(s["name"] for s in table["series"])}
    edges = (table["width"] - 4, table["height"] - 2)
    return all(0 < v < edges[k % 2] for t, at in texts if t in asked for k, v in enumerate(at))


def main() -> None:
    args = parse_arguments(__doc__)
    libraries = [name for name in LIBRARIES if (name in HELD_OUT) == args.held_out]
    with drawing(args, "charts.zip", "charts.json") as (browser, archive):
        for library in libraries:
            page = open_page(browser, library, args.modules)
            for number in range(args.count // len(libraries)):
                r = random.Random(f"{args.seed} {library} {number}")
                table = {**make_table(r), "turn": r.choice((0, 90, -90, 45))}  # of the labels
                picture, shown = draw_chart(page, library, table)
                if is_whole(table, shown["texts"]):
                    archive.add(picture, {"library": library, **table, **shown})
            page.close()


if __name__ == "__main__":
    main()
