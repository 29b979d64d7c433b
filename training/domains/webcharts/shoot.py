"""Draw random charts with plotting libraries for browsers and keep each with its table.

    python -m training.domains.webcharts.shoot --modules out/kits/node_modules --charts 1000 --out out/charts

The folder of node_modules must hold the packages of LIBRARIES. The result is ``charts.zip`` with ``N.webp`` and one
``charts.json``: for each chart its library and its table (see tables.py). Charts of the libraries HELD_OUT are for
evaluation only.
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
from playwright.sync_api import sync_playwright

from training.domains.webcharts.tables import make_table

LIBRARIES = {
    "echarts": ("echarts/dist/echarts.min.js",),
    "chartjs": ("chart.js/dist/chart.umd.min.js",),
    "billboard": ("billboard.js/dist/billboard.pkgd.min.js",),
    "plotly": ("plotly.js-dist-min/plotly.min.js",),
    "vega": (
        "vega/build/vega.min.js",
        "vega-lite/build/vega-lite.min.js",
        "vega-embed/build/vega-embed.min.js",
    ),
}
"""Library to scripts, below node_modules. Apache-2.0 (echarts), BSD-3-Clause (vega), MIT (the rest)."""

DRAW = Path(__file__).parent / "libraries.js"
HELD_OUT = ("plotly", "vega")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--modules", type=Path, required=True, help="folder of node_modules")
    p.add_argument("--charts", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--held-out", action="store_true", help="charts by the libraries for evaluation")
    p.add_argument("--chromium", default="/usr/bin/chromium")
    p.add_argument("--out", type=Path, required=True, help="folder of charts.zip")
    args = p.parse_args()
    libraries = [name for name in LIBRARIES if (name in HELD_OUT) == args.held_out]
    args.out.mkdir(parents=True, exist_ok=True)
    charts: list[dict[str, Any]] = []
    with (
        sync_playwright() as play,
        zipfile.ZipFile(args.out / "charts.zip", "w", zipfile.ZIP_STORED) as archive,
    ):
        flags = [
            "--no-sandbox",
            "--allow-file-access-from-files",
            "--disable-background-networking",
        ]
        browser = play.chromium.launch(executable_path=args.chromium, args=flags)
        for library in libraries:
            page = browser.new_page()
            scripts = "".join(
                f'<script src="{(args.modules / s).resolve().as_uri()}"></script>'
                for s in LIBRARIES[library]
            )
            scripts += f"<script>{DRAW.read_text()}</script>"
            if library == "billboard":
                sheet = args.modules / "billboard.js/dist/billboard.min.css"
                scripts += f'<link rel=stylesheet href="{sheet.resolve().as_uri()}">'
            place = args.modules / f"chart-{library}.html"
            place.write_text(
                f"<!doctype html><meta charset=utf-8>{scripts}<body style='margin:0'><div id=h></div></body>"
            )
            page.goto(place.resolve().as_uri(), wait_until="load")
            for number in range(args.charts // len(libraries)):
                r = random.Random(f"{args.seed} {library} {number}")
                table = make_table(r)
                page.set_viewport_size({"width": table["width"], "height": table["height"]})
                back, ink = ("#222", "#ddd") if table["dark"] else ("#fff", "#222")
                style = f"background:{back};color:{ink};font-family:{table['font']}"
                page.evaluate(f"""document.body.style.cssText = 'margin:0;{style}';
                    document.getElementById('h').innerHTML = '<div id=c></div>'""")
                page.evaluate("([library, table]) => DRAW[library](table)", [library, table])
                page.wait_for_timeout(30)
                picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
                out = io.BytesIO()
                picture.save(out, "WEBP", quality=85, method=4)
                archive.writestr(f"{len(charts)}.webp", out.getvalue())
                charts.append({"library": library, **table})
            page.close()
        archive.writestr("charts.json", json.dumps(charts, separators=(",", ":")))
        browser.close()
    print(f"{len(charts)} charts")


if __name__ == "__main__":
    main()
