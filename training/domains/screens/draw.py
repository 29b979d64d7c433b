"""Pages of screens.zip, or held/screens.zip, of the data folder, and what may be asked about each from its elements."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

from training.domains.drawn import Place, open_drawings
from training.domains.phrasing import off_topic, plural, read, tell
from training.domains.picture import Ask, Mark, Picture, centre, find, in_order
from training.domains.screens.pages import ACTIONS, FIELDS, OPTIONS, SECTIONS
from training.domains.text.words import title
from training.scenes.phrases import WAYS
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
        ways = _named(rng, role, name)
        yield find("point", "screens click", rng.choice(ways), [box])
        if rng.random() < 0.5:
            yield find("detect", "screens element", rng.choice(ways[:5]), [box])
    yield from _read(rng, e)


def _named(rng: random.Random, role: str, name: str) -> list[str]:
    """The ways to name what is clicked; the first five name the element."""
    thing, lower = rng.choice(SPOKEN[role]), name.lower()
    ways = [
        f'the "{name}" {thing}',
        f"{name} {thing}",
        f"{lower} {thing}",
        f"the {lower} {thing}",
        f'"{name}"',
    ]
    if role in ("button", "link"):
        to_do = lower.rstrip("?")
        ways += [f"where to click to {to_do}", f'where do I click for "{name}"?', name]
    if role in ("input", "select"):
        ways += [f"where to enter {lower}", f"field for {lower}", f"the field to type {lower} into"]
    if role in ("checkbox", "radio"):
        ways += [f"where to switch {lower} on or off"]
    return ways


def _read(rng: random.Random, e: Element) -> Iterator[Ask]:
    role, name, value, state = e["role"], e["name"], e.get("value", ""), e.get("state")
    if role in ("input", "select") and "•" not in value:
        ask = read if value else tell
        said = value or "It is empty."
        yield ask(rng, "screens field", WAYS["field"], said, n=name, l=name.lower())
    if role in ("checkbox", "radio"):
        said = "yes" if state == "on" else "no"
        yield tell(rng, "screens state", WAYS["switched on"], said, n=name)
    if role == "button" and (state == "disabled" or rng.random() < 0.1):
        said = "yes" if state == "disabled" else "no"
        yield tell(rng, "screens state", WAYS["disabled"], said, n=name)
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
            several = plural(thing)
            said = rng.choice((thing, several, f"all {several}"))
            yield find("detect", "screens elements", said, boxes)
            yield tell(rng, "screens count", WAYS["count of elements"], str(len(found)), t=several)
    headings = roles.get("heading", [])
    if headings:
        top = min(headings, key=lambda e: e["box"][1])
        yield read(rng, "screens heading", WAYS["page heading"], top["name"])
    menu = [e["name"] for e in roles.get("menu item", [])]
    if len(menu) > 2:
        yield read(rng, "screens menu", WAYS["menu"], ", ".join(menu))
        k = rng.randrange(len(menu) - 1)
        yield read(rng, "screens menu", WAYS["next in menu"], menu[k + 1], n=menu[k])
    buttons = roles.get("button", [])
    if 1 <= len(buttons) <= 6:
        order = sorted(buttons, key=lambda e: (round(e["box"][1] / 12), e["box"][0]))
        yield read(rng, "screens buttons", WAYS["buttons"], ", ".join(e["name"] for e in order))


def _absent(rng: random.Random, elements: list[Element]) -> Iterator[Ask]:
    there = {e["name"].lower() for e in elements} | {e.get("value", "").lower() for e in elements}
    name = rng.choice([n for n in ACTIONS + FIELDS + OPTIONS + SECTIONS if n.lower() not in there])
    role = "button" if name in ACTIONS else "input" if name in FIELDS else "checkbox"
    if rng.random() < 0.5 and (other := title(rng, 20)).lower() not in there:
        name, role = other, rng.choice(("button", "input", "input", "checkbox"))
    ways = _named(rng, role, name)
    yield Ask("point", "absent", rng.choice(ways))
    yield Ask("detect", "absent", rng.choice(ways[:5]))
    yield tell(rng, "absent", WAYS["element"], "no", n=name, t=SPOKEN[role][0])
    if role == "input":
        yield tell(
            rng, "absent", WAYS["field"], f"There is no {name.lower()}.", n=name, l=name.lower()
        )
    named = [e for e in elements if e["role"] in ("button", "input", "checkbox")]
    shown = rng.choice(named or elements)
    thing = SPOKEN.get(shown["role"], ("text",))[0]
    if thing != "icon":
        yield tell(rng, "screens present", WAYS["element"], "yes", n=shown["name"], t=thing)


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
