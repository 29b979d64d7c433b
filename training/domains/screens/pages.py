"""Random web pages whose elements say what they are.

An element that a question may name carries ``data-role`` and ``data-name``. A name occurs once on a page, so that one
place is meant. The style sheets are those of npm packages; pages of THEMES_HELD_OUT are for evaluation only.
"""

import html
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from training.domains.text import words as w
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

    def pick(self, names: list[str] | tuple[str, ...], any_words: float = 0.5) -> str:
        """A name that the page does not have yet, a share of any words. If all are taken, one with a number."""
        for _ in range(20):
            own = self.rng.random() < any_words
            name = w.title(self.rng, 22) if own else self.rng.choice(names)
            if name.lower() not in self.taken:
                self.taken.add(name.lower())
                return name
        return self.pick([f"{self.rng.choice(names)} {self.rng.randint(2, 99)}"])

    def classes(self, part: str) -> str:
        choices = CLASSES.get(self.theme, {}).get(part)
        return f' class="{self.rng.choice(choices)}"' if choices else ""

    def phrase(self) -> str:
        if self.rng.random() < 0.75:
            return w.title(self.rng)
        return f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}".capitalize()

    def title(self) -> str:
        return self.pick([self.phrase() for _ in range(4)])

    def value(self, name: str) -> str:
        """What somebody may have typed into a field of this name."""
        r = self.rng
        known = {"Email": w.email, "Phone": w.phone, "Date": w.date, "Time": w.time}
        if name in known:
            return known[name](r)
        if name in ("Password", *NUMBERS):
            return "•" * r.randint(6, 12) if name == "Password" else str(r.randint(1, 9999))
        if "ame" in name and r.random() < 0.7:
            return r.choice((r.choice(PEOPLE), w.name(r), f"{w.term(r)}_{r.randint(1, 99)}"))
        return w.value(r, name) if r.random() < 0.7 else self.phrase()

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
    name = page.pick(tuple(page.icons), 0)
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
    wide = page.rng.choice((16, 20, 26, 32))
    box = f'<input type=text size={wide}{page.classes("input")} value="{html.escape(value)}"{hint} {mark}>'
    side = page.rng.random() < 0.3
    return f"<label>{html.escape(name)}{' ' if side else '<br>'}{box}</label>"


def drop_down(page: Page) -> str:
    name = page.pick(FIELDS)
    values = [page.phrase() for _ in range(3)]
    chosen = page.rng.choice(values)
    items = "".join(f"<option{' selected' if v == chosen else ''}>{html.escape(v)}" for v in values)
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
    level = page.rng.choice((1, 1, 2, 3, 4))
    return f"<h{level} {page.mark('heading', name)}>{html.escape(name)}</h{level}>"


def table(page: Page) -> str:
    r = page.rng
    known = "Item Price Quantity Owner Status Date".split() + [w.title(r, 12) for _ in range(4)]
    columns = [*dict.fromkeys(r.sample(known, r.randint(2, 4)))]
    body = ""
    for _ in range(r.randint(2, 6)):
        cells, first = "", page.title()
        for k, column in enumerate(columns):
            value = first if k == 0 else {
                "Item": page.phrase(), "Price": f"{r.randint(1, 99)}.{r.randint(0, 99):02}", "Date": w.date(r),
                "Quantity": str(r.randint(1, 500)), "Owner": r.choice(PEOPLE), "Status": r.choice(STATES),
            }.get(column) or w.value(r)  # fmt: skip
            mark = page.mark("cell", value, row=first, column=column)
            cells += f"<td {mark}>{html.escape(value)}</td>"
        body += f"<tr>{cells}</tr>"
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    return f"{heading(page)}<table{page.classes('table')}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def cards(page: Page) -> str:
    out = ""
    for _ in range(page.rng.randint(2, 4)):
        title = page.title()
        price = w.price(page.rng) if page.rng.random() < 0.5 else f"${page.rng.randint(0, 400)}"
        inside = f"<b {page.mark('heading', title)}>{html.escape(title)}</b><br>"
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
    body = f"{head}{prose(page)}{button(page)} {button(page)}"
    return f'<div style="border:1px solid #8888;border-radius:6px;padding:10px;max-width:340px">{body}</div>'


def prose(page: Page) -> str:
    """Paragraphs that no question names."""
    texts = (f"{page.phrase()} {page.phrase()}" for _ in range(page.rng.randint(1, 3)))
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def messages(page: Page) -> str:
    out = ""
    for person in page.rng.sample(PEOPLE, page.rng.randint(2, 5)):
        text = page.phrase()
        mark = page.mark("cell", text, row=person, column="Message")
        out += f"<div style='margin:4px 0'><b>{person}</b>: <span {mark}>{html.escape(text)}</span></div>"
    return heading(page) + out


def navigation(page: Page, upright: bool) -> str:
    names = [page.pick(SECTIONS) for _ in range(page.rng.randint(3, 6))]
    gap, banner, ink = page.rng.randint(8, 34), "padding:4px", ""
    if page.rng.random() < 0.4:
        banner = f"padding:14px 20px;background:hsl({page.rng.randint(0, 359)} 30% 16%)"
        ink = f"color:#fff;font-weight:{page.rng.choice((400, 700))};"
    items = "".join(
        f'<a href="#" style="display:{"block" if upright else "inline-block"};{ink}margin:3px {gap}px 3px 0" '
        f"{page.mark('menu item', n)}>{html.escape(n)}</a>"
        for n in names
    )
    return f"<nav style='display:block;text-align:left;{banner}'>{items}</nav>"


BLOCKS = (form, form, table, cards, options, toolbar, dialog, messages)


def make_page(seed: int, theme: str, icons: dict[str, str], folder: str) -> tuple[str, int, int]:
    """A page as HTML with the viewport's width and height in pixels. ``folder`` is the URL of node_modules."""
    r = random.Random(seed)
    page = Page(r, theme, icons)
    width, height = r.randint(34, 110) * 10, r.randint(30, 76) * 10
    family, base = r.choice(FONTS), r.choice((13, 14, 15, 16, 16, 18, 20))
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
    card = r.random() < 0.35  # a panel in the middle of the page, as forms have
    upright = not card and width > 520 and r.random() < 0.35
    count = 1 + (height > 420) + (width > 700) * (r.random() < 0.6)
    blocks = [r.choice(BLOCKS)(page) for _ in range(1 if card else count)]
    blocks = [block + (prose(page) if r.random() < 0.15 else "") for block in blocks]
    columns = 2 if width > 700 and r.random() < 0.5 and not upright and not card else 1
    section = '<section style="break-inside:avoid;margin:8px 0;text-align:left">'
    panel = f"background:hsl({r.randint(0, 359)} 20% 99%);color:#1d2733;border-radius:{r.choice((0, 6, 12))}px;"
    panel += f"box-shadow:0 2px 12px #0003;padding:{r.randint(10, 34)}px;margin:20px auto;"
    panel += f"max-width:{r.randint(300, 640)}px"
    main = f'<div style="columns:{columns};column-gap:24px;{panel if card else ""}">'
    main += "".join(f"{section}{block}</section>" for block in blocks)
    menu = navigation(page, upright) if r.random() < 0.7 else ""
    sheet = f'<link rel=stylesheet href="{folder}/{THEMES[theme]}">' if THEMES[theme] else ""
    body = (
        f"<div style='display:{'flex' if upright else 'block'};gap:20px'>{menu}{main}</div></div>"
    )
    style = f"@font-face{{font-family:F;src:url({font})}}"
    style += f"*{{text-transform:none!important}}body{{margin:0;padding:{r.randint(4, 20)}px;max-width:none}}{own}"
    text = f"<!doctype html><meta charset=utf-8>{sheet}<style>{style}</style><body>{body}"
    return text, width, height
