"""Pictures such as a user has: 10 receipts, charts, pages and sheets of icons each, with questions and right answers.

    python -m training.samples FOLDER --modules out/kits/node_modules    # then: kestrel eval screens FOLDER

samples.toml says what they show. No domain of training/ draws them. Their fonts, icons and plotting libraries (plotly,
vega) are those that training never uses. ``make demo`` shows four of them.
"""

import argparse
import json
import random
import re
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from training.domains.browser import FLAGS, screenshot
from training.domains.charts.shoot import LIBRARIES
from training.domains.ground import ink_box
from training.domains.icons.draw import icon_masks
from training.domains.picture import Ask, Box
from training.domains.text.fonts import sources
from training.held_out import request_of

WIDTH, HEIGHT = 850, 600
Found = tuple[Image.Image, list[Ask]]
STYLE = """body{margin:0;background:BACK;color:INK;font-size:20px}
h1{font-size:28px;margin:0 0 16px}
label{display:block}
.card{background:CARD;border-radius:12px;padding:26px 34px;margin:34px auto;width:520px;box-shadow:0 2px 12px #0002}
input[type=text],input[type=password]{padding:8px 12px;border:1px solid #aab;border-radius:8px;width:100%;
box-sizing:border-box;margin:4px 0 14px} body,button,input{font-family:FONT;font-size:20px}
button{font-weight:700;padding:10px 22px;border:0;border-radius:8px;background:COLOUR;color:#fff;margin-right:12px}
button.second{background:#dfe4ec;color:#1a1a2e} a{color:COLOUR} table{width:100%;border-collapse:collapse}
th{background:#8883;text-align:left} nav{display:flex;gap:34px;padding:16px 40px;
background:#1d2733;color:#fff;font-weight:700}"""
RECEIPT = """body{margin:0;background:BACK} .p{position:absolute;left:50px;top:34px;width:380px;padding:28px 30px;
background:#fbfaf6;color:#222;font:19px/1.5 FONT;transform:rotate(TURNdeg);box-shadow:0 6px 18px #0007}
.c{text-align:center} .r{display:flex;justify-content:space-between} .l{border-top:2px dashed #777;margin:8px 0}
.t{font-weight:700;font-size:22px} h1{font-size:26px;margin:0}"""
MONO = "roboto-mono victor-mono spline-sans-mono fira-mono geist-mono overpass-mono cabin".split()
TAGS = {
    "field": "<label>{0}<br><input type=text data-w='{0}' value='{1}'></label>",
    "password": "<label>{0}<br><input type=password data-w='{0}' value='{1}'></label>",
    "on": "<p data-w='{0}'><input type=checkbox checked> {0}</p>",
    "off": "<p data-w='{0}'><input type=checkbox> {0}</p>",
    "button": "<button data-w='{0}'>{0}</button>",
    "second": "<button class=second data-w='{0}'>{0}</button>",
    "link": "<a data-w='{0}'>{0}</a>",
}  # fmt: skip
"""What {KIND NAME: VALUE} of samples.toml stands for."""
SPOKEN = {"bar": "a bar chart", "barh": "a bar chart", "line": "a line chart", "pie": "a pie chart"}


def filled(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def face(font: str, folder: Path) -> str:
    """The style that loads a held-out font, whose files it puts into the folder."""
    rules = []
    with zipfile.ZipFile(sources() / "fonts.zip") as archive:
        for weight in (400, 700):
            file = folder / f"{font}-{weight}.ttf"
            file.write_bytes(archive.read(f"held/{font}-{weight}-normal.ttf"))
            source = f"src:url({file.as_uri()});font-weight:{weight}"
            rules.append(f"@font-face{{font-family:{font};{source}}}")
    return "".join(rules)


def shown(page: Page, folder: Path, html: str, low: str = "") -> tuple[Image.Image, dict[str, Box]]:
    """The page, cut below the elements ``low``, and the boxes of its named elements."""
    place = folder / "page.html"
    place.write_text(f"<!doctype html><meta charset=utf-8>{html}")
    page.goto(place.as_uri(), wait_until="load")
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(700 if "<script" in html else 100)
    edges = page.evaluate("""Object.fromEntries([...document.querySelectorAll('[data-w]')].map(e => {
        const r = e.getBoundingClientRect(); return [e.dataset.w, [r.left, r.top, r.right, r.bottom]] }))""")
    boxes: dict[str, Box] = {name: tuple(box) for name, box in edges.items()}
    bottom = f"Math.max(...[...document.querySelectorAll('{low}')].map(e => e.getBoundingClientRect().bottom))"
    high = int(page.evaluate(bottom)) + 34 if low else HEIGHT
    image = screenshot(page)
    return image.crop((0, 0, image.width, min(high, image.height))), boxes


def receipt(rng: random.Random, given: dict[str, Any], page: Page, folder: Path) -> Found:
    goods, font, money = given["goods"], rng.choice(MONO), rng.choice(("$", "£", ""))
    cents = [rng.randint(90, 1400) for _ in goods]
    rate = rng.choice((0, 5, 10, 20))
    tax = round(sum(cents) * rate / 100)
    total = f"{money}{(sum(cents) + tax) / 100:.2f}"
    prices = [f"{money}{c / 100:.2f}" for c in cents]
    rows = [*zip(goods, prices, strict=True)]
    date = rng.choice(("14/03/2026", "2026-05-22", "9 June 2026", "Aug 17, 2026"))
    untaxed = f"{money}{sum(cents) / 100:.2f}"
    taxed = [("Subtotal", untaxed), (f"VAT {rate}%", f"{money}{tax / 100:.2f}")]
    line = "<div class='r {}'><span data-w='{}'>{}</span><span>{}</span></div>"
    body = [line.format("", a, a, b) for a, b in rows] + ["<div class=l></div>"]
    body += [line.format("", a, a, b) for a, b in (taxed if rate else ())]
    body += [line.format("t", "Total", "Total", total), line.format("", "Card", "Card", total)]
    turn, back = rng.uniform(-2, 2), rng.choice(("#8a6f55", "#5d6a72", "#3f4a44", "#c9cdd2"))
    style = filled(RECEIPT, FONT=font, TURN=round(turn, 2), BACK=back)
    head = f"<h1 class=c>{given['shop']}</h1><div class=c>{given['street']}</div>"
    dated = line.format("", "date", date, f"{rng.randint(7, 21):02}:{rng.randint(0, 59):02}")
    page.set_viewport_size({"width": 540, "height": 760})
    written = f"{head}{dated}<div class=l></div>{''.join(body)}<div class=c>Thank you!</div>"
    html = f"<style>{face(font, folder)}{style}</style><div class=p>{written}</div>"
    image, boxes = shown(page, folder, html, ".p")
    bought, other = rng.sample(range(len(goods)), 2)
    absent = rng.choice(("pizza", "fish", "wine", "sugar", "lamp"))
    asks = [
        Ask("query", "receipt total", "What is the total?", total),
        Ask("query", "receipt shop", "What is the name of the shop?", given["shop"]),
        Ask("query", "receipt date", "What is the date?", date),
        *(Ask("query", "receipt price", f"How much is the {goods[k].lower()}?", prices[k]) for k in (bought, other)),
        Ask("query", "receipt count", "How many items were bought?", str(len(goods))),
        Ask("query", "receipt absent", f"How much is the {absent}?", f"There is no {absent}."),
        Ask("detect", "receipt find a word", goods[bought], boxes=(boxes[goods[bought]],)),
    ]  # fmt: skip
    return image, asks


def screen(rng: random.Random, given: dict[str, Any], page: Page, folder: Path) -> Found:
    def tag(match: re.Match[str]) -> str:
        kind, name, value = match[1], match[2], match[3] or ""
        if kind == "menu":
            items = "".join(f"<span data-w='{item}'>{item}</span>" for item in name.split("|"))
            return f"<nav>{items}</nav>"
        return TAGS[kind].format(name, value)

    body = re.sub(r"\{(\w+) ([^}:]+)(?:: ([^}]*))?\}", tag, given["html"])
    dark = given["dark"]
    style = filled(STYLE, FONT=given["font"], COLOUR=given["colour"], BACK="#15181d" if dark else "#eef1f5",
                   INK="#e8eaed" if dark else "#1d2733", CARD="#23272e" if dark else "#fff")  # fmt: skip
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    html = f"<style>{face(given['font'], folder)}{style}</style>{body}"
    image, boxes = shown(page, folder, html, ".card")
    asks = []
    for skill, kind, text, right in given["asks"]:
        answer, names = (right, []) if isinstance(right, str) else ("", right)
        places = tuple(boxes[name] for name in names)
        asks.append(Ask(skill, f"screen {kind}", text, answer, places))
    return image, asks


def _plotly(t: dict[str, Any], font: str, numbers: bool) -> str:
    shown = {
        "pie": {"type": "pie", "textinfo": "label+value" if numbers else "label"},
        "barh": {"type": "bar", "orientation": "h"},
        "bar": {"type": "bar", "textposition": "outside"},
        "line": {"mode": "lines+markers" + "+text" * numbers, "textposition": "top center"},
    }[t["kind"]]
    labels, of = {"pie": ("labels", "values"), "barh": ("y", "x")}.get(t["kind"], ("x", "y"))
    text = numbers and t["kind"] != "pie"
    traces = [
        {
            **shown,
            labels: t["labels"],
            of: values,
            "name": name,
            **({"text": values} if text else {}),
        }
        for name, values in t["series"].items()
    ]
    legend = len(t["series"]) > 1 or t["kind"] == "pie"
    layout = {"title": {"text": t["title"], "font": {"size": 26}}, "font": {"size": 18, "family": font},
              "width": WIDTH, "height": HEIGHT, "showlegend": legend,
              "xaxis": {"type": "-" if t["kind"] == "barh" else "category"}}  # fmt: skip
    return f"Plotly.newPlot('c', {json.dumps(traces)}, {json.dumps(layout)}, {{staticPlot: true}})"


def _vega(t: dict[str, Any], font: str, numbers: bool) -> str:
    rows = [{"l": label, "s": name, "v": value} for name, values in t["series"].items()
            for label, value in zip(t["labels"], values, strict=True)]  # fmt: skip
    several, kind = len(t["series"]) > 1, t["kind"]
    value = {"field": "v", "type": "quantitative", "title": None}
    named = {"field": "l", "type": "nominal", "sort": None, "title": None}
    if kind == "pie":
        channels: dict[str, Any] = {"theta": {**value, "stack": True}, "color": named}
        mark = {"type": "arc", "outerRadius": 200}
    else:
        channels = {"x": {**named, "axis": {"labelAngle": 0}}, "y": value}
        line = {"type": kind, "point": True, "strokeWidth": 3}
        mark = line if kind == "line" else {"type": "bar"}
    if several:
        channels["color"] = {"field": "s", "type": "nominal", "title": None}
    layers = [{"mark": mark, "encoding": channels}]
    if numbers:
        text = {"radius": 230} if kind == "pie" else {"dy": -12}
        written = {**channels, "text": {"field": "v"}}
        layers.append({"mark": {"type": "text", "fontSize": 18, **text}, "encoding": written})
    spec = {"$schema": "https://vega.github.io/schema/vega-lite/v5.json", "height": 480,
            "width": 660 if several or kind == "pie" else 740, "layer": layers, "data": {"values": rows},
            "title": {"text": t["title"], "fontSize": 26},
            "config": {"font": font, "axis": {"labelFontSize": 18}, "legend": {"labelFontSize": 18}}}  # fmt: skip
    return f"vegaEmbed('#c', {json.dumps(spec)}, {{actions: false, renderer: 'svg'}})"


def chart(rng: random.Random, given: dict[str, Any], page: Page, folder: Path) -> Found:
    font, numbers = rng.choice(("hind", "roboto", "cabin", "asap", "mulish")), rng.random() < 0.5
    single = given["kind"] != "barh" and len(given["series"]) == 1
    library = "vega" if single and rng.random() < 0.5 else "plotly"
    drawing = (_vega if library == "vega" else _plotly)(given, font, numbers)
    scripts = "".join(
        f"<script src='{(folder / s).as_uri()}'></script>" for s in LIBRARIES[library]
    )
    style = f"<style>{face(font, folder)}body{{margin:8px;font-family:{font}}}</style>"
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    ready = f"<script>document.fonts.load('18px {font}').then(() => {drawing})</script>"
    image, _ = shown(page, folder, f"{style}{scripts}<div id=c></div>{ready}")
    return image, list(_about_chart(rng, given, numbers))


def _about_chart(rng: random.Random, t: dict[str, Any], numbers: bool) -> Iterator[Ask]:
    labels, kind, several = t["labels"], t["kind"], len(t["series"]) > 1
    name, values = [*t["series"].items()][-1]
    of = f" of {name}" if several else ""
    yield Ask("query", "chart kind", "What kind of chart is this?", SPOKEN[kind])
    yield Ask("query", "chart title", "What is the title of the chart?", t["title"])
    for k in rng.sample(range(len(labels)), 2) if kind != "pie" or numbers else ():
        of_what = f"{name} for {labels[k]}" if several else labels[k]
        yield Ask("query", "charts value", f"What is the value of {of_what}?", f"{values[k]:g}")
    for end, value in (("highest", max(values)), ("lowest", min(values))):
        text = f"Which one has the {end} value{of}?"
        yield Ask("query", "chart extreme", text, labels[values.index(value)])
    if kind != "line":
        parts = "slices" if kind == "pie" else "bars"
        count = len(labels) * len(t["series"])
        yield Ask("query", "chart count", f"How many {parts} are there?", str(count))
    if several:
        yield Ask("query", "chart series", "Which series are shown?", ", ".join(t["series"]))
    yield Ask("query", "chart absent", "What is the value of Zurich?", "There is no Zurich.")


def icons(rng: random.Random) -> Found:
    drawn = icon_masks(True)
    columns, rows, side = rng.choice(((5, 4, 84), (4, 3, 110), (6, 4, 72), (5, 3, 96)))
    ground = rng.choice(("#ffffff", "#f4f1ea", "#e9f0f7", "#1e2430"))
    inks = "#c0392b #1f8f5f #2457d6 #7b3fb5".split()
    inks = "#ffd166 #7bdff2 #f7aef8".split() if ground == "#1e2430" else inks
    image = Image.new("RGB", (WIDTH, HEIGHT), ground)
    often, *others = rng.sample(sorted(drawn), 1 + columns * rows)
    times = rng.randint(2, 4)
    names = [often] * times + others[: columns * rows - times]
    absent = others[-1]
    rng.shuffle(names)
    boxes: list[Box] = []
    for i, name in enumerate(names):
        x = round((i % columns + 0.5) * WIDTH / columns - side / 2)
        y = round((i // columns + 0.5) * HEIGHT / rows - side / 2)
        mask = Image.fromarray(drawn[name][0]).resize((side, side), Image.Resampling.LANCZOS)
        image.paste(rng.choice(inks), (x, y), mask)
        boxes.append(ink_box(mask, x, y))

    def places(name: str) -> tuple[Box, ...]:
        return tuple(box for box, other in zip(boxes, names, strict=True) if other == name)

    middle = [((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes]
    one = rng.choice([name for name in names if name != often])
    asked = rng.sample(range(len(names)), 6)
    asks = [
        *(Ask("query", "icons name", "What icon is this?", names[k], refs=(middle[k],)) for k in asked),
        Ask("query", "icons count", f"How many {often} icons are there?", str(times)),
        Ask("query", "icons count of all", "How many icons are there?", str(len(names))),
        Ask("detect", "icons detect", f"{often} icon", boxes=places(often)),
        Ask("point", "icons point", f"{one} icon", boxes=places(one)),
        Ask("query", "icons absent", f"Is there a {absent} icon?", "no"),
        Ask("point", "icons absent", f"{absent} icon"),
    ]  # fmt: skip
    return image, asks


def row_of(file: Path, image: Image.Image, asks: Sequence[Ask]) -> str:
    image.save(file)
    requests = [request_of(ask, *image.size) for ask in asks]
    return json.dumps({"image": file.name, "requests": requests}, ensure_ascii=False)


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("folder", type=Path)
    p.add_argument("--modules", type=Path, required=True, help="node_modules with plotly and vega")
    p.add_argument("--chromium", default="/usr/bin/chromium")
    given = p.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    contents = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    rows = []
    with sync_playwright() as play:
        page = play.chromium.launch(executable_path=given.chromium, args=FLAGS).new_page()
        for name, draw in (("receipt", receipt), ("chart", chart), ("screen", screen)):
            for number, content in enumerate(contents[name]):
                rng = random.Random(f"{name} {number}")
                found = draw(rng, content, page, given.modules.resolve())
                rows.append(row_of(given.folder / f"{name}{number}.png", *found))
    for number in range(10):
        found = icons(random.Random(f"icons {number}"))
        rows.append(row_of(given.folder / f"icons{number}.png", *found))
    (given.folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
