"""Pages of screens.zip, or held/screens.zip, of the data folder, and what may be asked about each from its elements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from training.domains.drawn import Place, open_drawings
from training.domains.phrasing import off_topic, read, tell
from training.domains.picture import Ask, Mark, Picture, centre, find, in_order
from training.domains.screens.pages import ACTIONS, FIELDS, OPTIONS, SECTIONS
from training.sources import icon_names

Element = dict[str, Any]

SPOKEN = {
    "button": ("button",), "link": ("link",), "input": ("text field", "field", "input", "text box"),
    "select": ("drop-down", "select", "dropdown"), "checkbox": ("checkbox", "check box", "option"),
    "radio": ("radio button", "option"), "icon": ("icon",), "menu item": ("menu item", "link", "tab"),
    "heading": ("heading", "title"),
}  # fmt: skip
CLICKED = ("button", "link", "menu item", "checkbox", "radio", "icon", "input", "select")


def ask_about(rng: random.Random, elements: list[Element], place: Place, width: int) -> list[Ask]:
    """All questions of a page, in a random order."""
    asks = [ask for element in elements for ask in _about_one(rng, element, place)]
    asks += _about_all(rng, elements, place, width)
    asks += _absent(rng, elements)
    rng.shuffle(asks)
    return asks


def _about_one(rng: random.Random, e: Element, place: Place) -> Iterator[Ask]:
    role, name, box = e["role"], e["name"], place.box(e["box"])
    if role in CLICKED:
        thing, lower = rng.choice(SPOKEN[role]), name.lower()
        ways = [
            f'the "{name}" {thing}',
            f"{name} {thing}",
            f"{lower} {thing}",
            f"the {lower} {thing}",
        ]
        ways.append(f'"{name}"')
        if role in ("button", "link"):
            to_do = lower.rstrip("?")
            ways += [f"where to click to {to_do}", f'where do I click for "{name}"?', name]
        if role in ("input", "select"):
            ways += [f"where to enter {lower}", f"field for {lower}"]
            ways.append(f"the field to type {lower} into")
        if role in ("checkbox", "radio"):
            ways += [f"where to switch {lower} on or off"]
        yield find("point", "screens click", rng.choice(ways), [box])
        if rng.random() < 0.5:
            yield find("detect", "screens element", rng.choice(ways[:5]), [box])
    yield from _read(rng, e)


def _read(rng: random.Random, e: Element) -> Iterator[Ask]:
    role, name, value, state = e["role"], e["name"], e.get("value", ""), e.get("state")
    if role in ("input", "select") and "•" not in value:
        ways = 'What is in the field "{n}"?|What is the {l}?|What does "{n}" say?|Which {l} is entered?'
        ask = read if value else tell
        yield ask(rng, "screens field", ways, value or "It is empty.", n=name, l=name.lower())
    if role in ("checkbox", "radio"):
        ways = 'Is "{n}" checked?|Is "{n}" on?|Is {n} selected?|Is "{n}" turned on?|Is {n} enabled?'
        yield tell(rng, "screens state", ways, "yes" if state == "on" else "no", n=name)
    if role == "button" and (state == "disabled" or rng.random() < 0.1):
        ways = 'Is the button "{n}" disabled?|Is {n} greyed out?|Can I not click "{n}"?'
        yield tell(rng, "screens state", ways, "yes" if state == "disabled" else "no", n=name)
    if role == "cell" and e["row"] != name:
        ways = {
            "Message": "What does {r} say?|What did {r} write?|Read the message of {r}.",
            "Price": "What does {r} cost?|How much is {r}?|What is the price of {r}?",
            "Owner": "Who is the owner of {r}?|Who owns {r}?",
        }.get(e["column"], "What is the {c} of {r}?|Which {c} has {r}?|{r}: what {c}?")
        yield read(rng, "screens cell", ways, name, r=e["row"], c=e["column"].lower())


def _about_all(
    rng: random.Random, elements: list[Element], place: Place, width: int
) -> Iterator[Ask]:
    roles: dict[str, list[Element]] = {}
    for e in elements:
        roles.setdefault(e["role"], []).append(e)
    for role in ("button", "checkbox", "icon", "input"):
        found, thing = roles.get(role, []), SPOKEN[role][0]
        if 1 <= len(found) <= 12:
            boxes = in_order([place.box(e["box"]) for e in found], width, centre)
            said = rng.choice((thing, thing + "s", f"all {thing}s"))
            yield find("detect", "screens elements", said, boxes)
            ways = "How many {t}s are there?|How many {t}s can you see?|Count the {t}s."
            yield tell(rng, "screens count", ways, str(len(found)), t=thing)
    headings = roles.get("heading", [])
    if headings:
        top = min(headings, key=lambda e: e["box"][1])
        ways = "What does the first heading say?|What is the title of this page?|Read the heading at the top."
        yield read(rng, "screens heading", ways, top["name"])
    menu = [e["name"] for e in roles.get("menu item", [])]
    if len(menu) > 2:
        ways = "What is in the menu?|Which items does the menu have?|Read the menu.|List the menu items."
        yield read(rng, "screens menu", ways, ", ".join(menu))
        k = rng.randrange(len(menu) - 1)
        ways = 'What comes after "{n}" in the menu?|Which menu item follows {n}?'
        yield read(rng, "screens menu", ways, menu[k + 1], n=menu[k])
    buttons = roles.get("button", [])
    if 1 <= len(buttons) <= 6:
        ways = (
            "Which buttons are there?|What do the buttons say?|Read the buttons.|Name all buttons."
        )
        order = sorted(buttons, key=lambda e: (round(e["box"][1] / 12), e["box"][0]))
        yield read(rng, "screens buttons", ways, ", ".join(e["name"] for e in order))


def _absent(rng: random.Random, elements: list[Element]) -> Iterator[Ask]:
    there = {e["name"].lower() for e in elements} | {e.get("value", "").lower() for e in elements}
    name = rng.choice([n for n in ACTIONS + FIELDS + OPTIONS + SECTIONS if n.lower() not in there])
    thing = "button" if name in ACTIONS else "field" if name in FIELDS else "option"
    text = rng.choice((f"{name} {thing}", f'"{name}"', f'the "{name}" {thing}', name.lower()))
    yield Ask(rng.choice(("point", "detect")), "absent", text)
    ways = 'Is there a {t} "{n}"?|Does the page have a {t} "{n}"?|Can I see a {n} {t}?'
    yield tell(rng, "absent", ways, "no", n=name, t=thing)
    named = [e for e in elements if e["role"] in ("button", "input", "checkbox")]
    shown = rng.choice(named or elements)
    thing = SPOKEN.get(shown["role"], ("text",))[0]
    if thing != "icon":
        yield tell(rng, "screens present", ways, "yes", n=shown["name"], t=thing)


def draw(rng: random.Random, width: int, height: int, held: bool) -> Picture:
    archive = open_drawings("held/screens.zip" if held else "screens.zip", "pages.json")
    pixels, page, place = archive.place(rng, width, height)
    names = (
        _spoken().get(e["name"]) if e["role"] == "icon" else e["name"] for e in page["elements"]
    )
    elements = [{**e, "name": n} for e, n in zip(page["elements"], names, strict=True) if n]
    asks = ask_about(rng, elements, place, width)
    asks += () if held else _absent(rng, elements)
    asks += [off_topic(rng)] if rng.random() < 0.2 else []
    marks = [Mark(place.box(e["box"]), f"screen {e['role']}") for e in elements]
    return Picture(pixels, asks, marks, complete=False)


@cache
def _spoken() -> dict[str, str]:
    """The name that the domain of icons uses, by the name that an icon set uses."""
    return {o.replace("-", " "): name for name, others in icon_names().items() for o in others}
