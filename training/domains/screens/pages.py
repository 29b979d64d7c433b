"""Random web pages whose elements say what they are.

An element that a question may name carries ``data-role`` and ``data-name``. A name occurs once on a page, so that one
place is meant. The style sheets are those of npm packages; pages of THEMES_HELD_OUT are for evaluation only.
"""

import html
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from training.sources import word_lists

_LISTS = [*word_lists(Path(__file__).parent).values()]
ACTIONS, FIELDS, NUMBERS, OPTIONS, SECTIONS, NOUNS, ADJECTIVES, PEOPLE, STATES = _LISTS[:9]
FONTS, THEMES_HELD_OUT, ICONS = _LISTS[9:]
_THEMES = json.loads((Path(__file__).parent / "themes.json").read_text(encoding="utf-8"))
THEMES: dict[str, str] = _THEMES["sheets"]
CLASSES: dict[str, dict[str, list[str]]] = _THEMES["classes"]
"""Theme to style sheet, below node_modules. MIT, except purecss (BSD-3-Clause) and papercss (ISC)."""


@dataclass
class Page:
    """A page in the making: its random choices, theme and the names that are taken."""

    rng: random.Random
    theme: str
    icons: dict[str, str]
    taken: set[str] = field(default_factory=set)

    def pick(self, names: list[str] | tuple[str, ...]) -> str:
        """A name that the page does not have yet. If all are taken, one with a number."""
        for _ in range(20):
            name = self.rng.choice(names)
            if name.lower() not in self.taken:
                self.taken.add(name.lower())
                return name
        return self.pick([f"{self.rng.choice(names)} {self.rng.randint(2, 99)}"])

    def classes(self, part: str) -> str:
        choices = CLASSES.get(self.theme, {}).get(part)
        return f' class="{self.rng.choice(choices)}"' if choices else ""

    def phrase(self) -> str:
        return f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}".capitalize()

    def title(self) -> str:
        return self.pick([self.phrase() for _ in range(4)])

    def value(self, name: str) -> str:
        """What somebody may have typed into a field of this name."""
        r = self.rng
        first = r.choice(PEOPLE)
        by_name = {
            "Email": f"{first.lower()}{r.randint(1, 99)}@example.{r.choice(['com', 'org', 'net'])}",
            "Password": "•" * r.randint(6, 12),
            "Phone": f"{r.randint(100, 999)} {r.randint(1000, 9999)}",
            "Date": f"{r.randint(1, 28):02}/{r.randint(1, 12):02}/20{r.randint(20, 29)}",
            "Time": f"{r.randint(0, 23):02}:{r.randint(0, 59):02}",
            "Price": f"{r.randint(1, 300)}.{r.randint(0, 99):02}",
        }
        if name in (*by_name, *NUMBERS):
            return by_name.get(name) or str(r.randint(1, 9999))
        return first if "ame" in name else self.phrase()

    def mark(self, role: str, name: str, **more: str) -> str:
        parts = {"role": role, "name": name, **more}
        return " ".join(f'data-{key}="{html.escape(value)}"' for key, value in parts.items())


def button(page: Page) -> str:
    name = page.pick(ACTIONS)
    if page.rng.random() < 0.15:
        return f'<a href="#" {page.mark("link", name)}>{html.escape(name)}</a>'
    off = " disabled" if page.rng.random() < 0.06 else ""
    state = page.mark("button", name, state="disabled" if off else "enabled")
    return f"<button type=button{page.classes('button')} {state}{off}>{html.escape(name)}</button>"


def icon_button(page: Page) -> str:
    name = page.pick(tuple(page.icons))
    size = page.rng.choice((18, 20, 24, 28, 32))
    picture = page.icons[name].replace("<svg ", f'<svg width="{size}" height="{size}" ', 1)
    return f'<span style="padding:4px" {page.mark("icon", name)}>{picture}</span>'


def text_field(page: Page) -> str:
    name, value, hint = page.pick(FIELDS), "", ""
    if page.rng.random() < 0.6:
        value = page.value(name)
    elif page.rng.random() >= 0.5:
        hint = f' placeholder="{html.escape(page.phrase())}"'
    mark = page.mark("input", name, value=value)
    box = f'<input type=text size=16{page.classes("input")} value="{html.escape(value)}"{hint} {mark}>'
    side = page.rng.random() < 0.3
    return f"<label>{html.escape(name)}{' ' if side else '<br>'}{box}</label>"


def drop_down(page: Page) -> str:
    name = page.pick(FIELDS)
    values = [page.phrase() for _ in range(3)]
    chosen = page.rng.choice(values)
    items = "".join(f"<option{' selected' if v == chosen else ''}>{v}" for v in values)
    mark = page.mark("select", name, value=chosen)
    return f"<label>{html.escape(name)}<br><select{page.classes('select')} {mark}>{items}</select></label>"


def option(page: Page, kind: str = "checkbox", group: str = "") -> str:
    name, on = page.pick(OPTIONS), page.rng.random() < 0.5
    mark = page.mark(kind, name, state="on" if on else "off")
    key = f"o{len(page.taken)}"  # Some themes draw the box of the label that follows its input.
    box = f'<input type={kind} id={key} name="{group or name}"{page.classes(kind)}{" checked" if on else ""}>'
    return f"<div {mark}>{box} <label for={key} style='display:inline'>{html.escape(name)}</label></div>"


def form(page: Page) -> str:
    r = page.rng
    rows = [text_field(page) for _ in range(r.randint(1, 4))]
    rows += [drop_down(page)] if r.random() < 0.5 else []
    rows += [option(page) for _ in range(r.randint(0, 3))]
    buttons = " ".join(button(page) for _ in range(r.randint(1, 3)))
    rows.append(f"<div>{buttons}</div>")
    gap = r.choice((2, 6, 10))
    return heading(page) + "".join(f'<div style="margin:{gap}px 0">{row}</div>' for row in rows)


def heading(page: Page) -> str:
    name = page.phrase()
    level = page.rng.choice((2, 3, 4))
    return f"<h{level} {page.mark('heading', name)}>{name}</h{level}>"


def table(page: Page) -> str:
    r = page.rng
    columns = r.sample(["Item", "Price", "Quantity", "Owner", "Status", "Date"], r.randint(2, 4))
    body = ""
    for _ in range(r.randint(2, 6)):
        cells, first = "", page.title()
        for k, column in enumerate(columns):
            value = first if k == 0 else {
                "Item": page.phrase(), "Price": f"{r.randint(1, 99)}.{r.randint(0, 99):02}", "Date": page.value("Date"),
                "Quantity": str(r.randint(1, 500)), "Owner": r.choice(PEOPLE), "Status": r.choice(STATES),
            }[column]  # fmt: skip
            mark = page.mark("cell", value, row=first, column=column)
            cells += f"<td {mark}>{html.escape(value)}</td>"
        body += f"<tr>{cells}</tr>"
    head = "".join(f"<th>{c}</th>" for c in columns)
    return f"{heading(page)}<table{page.classes('table')}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cards(page: Page) -> str:
    out = ""
    for _ in range(page.rng.randint(2, 4)):
        title = page.title()
        price = f"{page.rng.choice('$€£')}{page.rng.randint(1, 400)}"
        inside = f"<b {page.mark('heading', title)}>{title}</b><br>"
        inside += f"<span {page.mark('cell', price, row=title, column='Price')}>{price}</span><br>{button(page)}"
        out += f'<div{page.classes("card")} style="flex:1;min-width:110px">{inside}</div>'
    return f'<div style="display:flex;gap:10px;flex-wrap:wrap">{out}</div>'


def options(page: Page) -> str:
    kind, group = page.rng.choice(("checkbox", "checkbox", "radio")), page.phrase()
    group, head = group if kind == "radio" else "", heading(page)
    return head + "".join(option(page, kind, group) for _ in range(page.rng.randint(2, 6)))


def toolbar(page: Page) -> str:
    side = page.rng.choice(("flex", "flex", "inline-grid"))
    tools = "".join(icon_button(page) for _ in range(page.rng.randint(3, 9)))
    return f'<div style="display:{side};gap:8px;padding:4px;border:1px solid #8886">{tools}</div>'


def dialog(page: Page) -> str:
    head = heading(page)
    words = [page.rng.choice(ADJECTIVES + NOUNS) for _ in range(page.rng.randint(4, 10))]
    body = f"{head}<p>{' '.join(words).capitalize()}.</p>{button(page)} {button(page)}"
    return f'<div style="border:1px solid #8888;border-radius:6px;padding:10px;max-width:340px">{body}</div>'


def messages(page: Page) -> str:
    out = ""
    for person in page.rng.sample(PEOPLE, page.rng.randint(2, 5)):
        text = page.phrase()
        mark = page.mark("cell", text, row=person, column="Message")
        out += f"<div style='margin:4px 0'><b>{person}</b>: <span {mark}>{text}</span></div>"
    return heading(page) + out


def navigation(page: Page, upright: bool) -> str:
    names = [page.pick(SECTIONS) for _ in range(page.rng.randint(3, 6))]
    gap = page.rng.randint(8, 22)
    items = "".join(
        f'<a href="#" style="display:{"block" if upright else "inline-block"};margin:3px {gap}px 3px 0" '
        f"{page.mark('menu item', n)}>{n}</a>"
        for n in names
    )
    return f"<nav style='display:block;text-align:left;padding:4px'>{items}</nav>"


BLOCKS = (form, form, table, cards, options, toolbar, dialog, messages)


def make_page(seed: int, theme: str, icons: dict[str, str], folder: str) -> tuple[str, int, int]:
    """A page as HTML with the viewport's width and height in pixels. ``folder`` is the URL of node_modules."""
    r = random.Random(seed)
    page = Page(r, theme, icons)
    width, height = r.randint(34, 110) * 10, r.randint(30, 76) * 10
    family, base = r.choice(FONTS), r.choice((13, 14, 15, 16, 16, 18))
    font = f"{folder}/@fontsource/{family}/files/{family}-latin-400-normal.woff2"
    keep = theme in ("98", "xp") or r.random() < 0.15
    own = f"body,button,input,select,td,th{{font-family:F!important}}body{{font-size:{base}px}}" * (
        not keep
    )
    if theme == "none" or r.random() < 0.25:
        hue, dark = r.randint(0, 359), r.random() < 0.3
        back, ink = ("12%", "92%") if dark else ("95%", "12%")
        own += f"body{{background:hsl({hue} 30% {back});color:hsl({hue} 20% {ink})}}"
        if r.random() < 0.5:
            own += f"button{{background:hsl({r.randint(0, 359)} 60% 40%);color:#fff}}"
    upright = width > 520 and r.random() < 0.35
    count = 1 + (height > 420) + (width > 700) * (r.random() < 0.6)
    blocks = [r.choice(BLOCKS)(page) for _ in range(count)]
    columns = 2 if width > 700 and r.random() < 0.5 and not upright else 1
    section = '<section style="break-inside:avoid;margin:8px 0;text-align:left">'
    main = f'<div style="columns:{columns};column-gap:24px">'
    main += "".join(f"{section}{block}</section>" for block in blocks)
    menu = navigation(page, upright) if r.random() < 0.7 else ""
    sheet = f'<link rel=stylesheet href="{folder}/{THEMES[theme]}">' if THEMES[theme] else ""
    body = (
        f"<div style='display:{'flex' if upright else 'block'};gap:20px'>{menu}{main}</div></div>"
    )
    style = f"@font-face{{font-family:F;src:url({font})}}"
    style += f"body{{margin:0;padding:{r.randint(4, 20)}px;max-width:none}}{own}"
    text = f"<!doctype html><meta charset=utf-8>{sheet}<style>{style}</style><body>{body}"
    return text, width, height
