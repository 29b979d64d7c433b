"""What may be asked about a page, from its own elements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from training.domains.drawn import Place
from training.domains.phrasing import vary
from training.domains.picture import Ask, centre, in_order
from training.domains.screens.pages import ACTIONS, FIELDS, OPTIONS, SECTIONS

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
        thing = rng.choice(SPOKEN[role])
        lower = name.lower()
        ways = [
            f'the "{name}" {thing}',
            f"{name} {thing}",
            f"{lower} {thing}",
            f"the {lower} {thing}",
            f'"{name}"',
        ]
        if role in ("button", "link"):
            ways += [
                f"where to click to {lower.rstrip('?')}",
                f'where do I click for "{name}"?',
                name,
            ]
        if role in ("input", "select"):
            ways += [
                f"where to enter {lower}",
                f"field for {lower}",
                f"the field to type {lower} into",
            ]
        if role in ("checkbox", "radio"):
            ways += [f"where to switch {lower} on or off"]
        yield Ask("point", "screens click", rng.choice(ways), boxes=(box,), points=(centre(box),))
        if rng.random() < 0.5:
            yield Ask("detect", "screens element", rng.choice(ways[:5]), boxes=(box,))
    yield from _read(rng, e)


def _read(rng: random.Random, e: Element) -> Iterator[Ask]:
    role, name, value, state = e["role"], e["name"], e.get("value", ""), e.get("state")
    if role in ("input", "select") and "•" not in value:
        ways = (
            'What is in the field "{n}"?',
            "What is the {l}?",
            'What does "{n}" say?',
            "Which {l} is entered?",
        )
        text = vary(rng, ways, n=name, l=name.lower())
        yield Ask("query", "screens field", text, value or "It is empty.", spelled=bool(value))
    if role in ("checkbox", "radio"):
        ways = (
            'Is "{n}" checked?',
            'Is "{n}" on?',
            "Is {n} selected?",
            'Is "{n}" turned on?',
            "Is {n} enabled?",
        )
        yield Ask(
            "query", "screens state", vary(rng, ways, n=name), "yes" if state == "on" else "no"
        )
    if role == "button" and (state == "disabled" or rng.random() < 0.1):
        ways = ('Is the button "{n}" disabled?', "Is {n} greyed out?", 'Can I not click "{n}"?')
        yield Ask(
            "query",
            "screens state",
            vary(rng, ways, n=name),
            "yes" if state == "disabled" else "no",
        )
    if role == "cell" and e["row"] != name:
        by = {
            "Message": ("What does {r} say?", "What did {r} write?", "Read the message of {r}."),
            "Price": ("What does {r} cost?", "How much is {r}?", "What is the price of {r}?"),
            "Owner": ("Who is the owner of {r}?", "Who owns {r}?"),
        }.get(e["column"], ("What is the {c} of {r}?", "Which {c} has {r}?", "{r}: what {c}?"))
        yield Ask(
            "query",
            "screens cell",
            vary(rng, by, r=e["row"], c=e["column"].lower()),
            name,
            spelled=True,
        )


def _about_all(
    rng: random.Random, elements: list[Element], place: Place, width: int
) -> Iterator[Ask]:
    roles: dict[str, list[Element]] = {}
    for e in elements:
        roles.setdefault(e["role"], []).append(e)
    for role in ("button", "checkbox", "icon", "input"):
        found = roles.get(role, [])
        thing = SPOKEN[role][0]
        if 1 <= len(found) <= 12:
            boxes = tuple(in_order([place.box(e["box"]) for e in found], width, centre))
            yield Ask(
                "detect",
                "screens elements",
                rng.choice((thing, thing + "s", f"all {thing}s")),
                boxes=boxes,
            )
            ways = ("How many {t}s are there?", "How many {t}s can you see?", "Count the {t}s.")
            yield Ask("query", "screens count", vary(rng, ways, t=thing), str(len(found)))
    headings = roles.get("heading", [])
    if headings:
        top = min(headings, key=lambda e: e["box"][1])
        ways = (
            "What does the first heading say?",
            "What is the title of this page?",
            "Read the heading at the top.",
        )
        yield Ask("query", "screens heading", vary(rng, ways), top["name"], spelled=True)
    menu = roles.get("menu item", [])
    if len(menu) > 2:
        names = ", ".join(e["name"] for e in menu)
        ways = (
            "What is in the menu?",
            "Which items does the menu have?",
            "Read the menu.",
            "List the menu items.",
        )
        yield Ask("query", "screens menu", vary(rng, ways), names, spelled=True)
        k = rng.randrange(len(menu) - 1)
        ways = ('What comes after "{n}" in the menu?', "Which menu item follows {n}?")
        yield Ask(
            "query",
            "screens menu",
            vary(rng, ways, n=menu[k]["name"]),
            menu[k + 1]["name"],
            spelled=True,
        )
    buttons = roles.get("button", [])
    if 1 <= len(buttons) <= 6:
        ways = (
            "Which buttons are there?",
            "What do the buttons say?",
            "Read the buttons.",
            "Name all buttons.",
        )
        order = sorted(buttons, key=lambda e: (round(e["box"][1] / 12), e["box"][0]))
        yield Ask(
            "query",
            "screens buttons",
            vary(rng, ways),
            ", ".join(e["name"] for e in order),
            spelled=True,
        )


def _absent(rng: random.Random, elements: list[Element]) -> Iterator[Ask]:
    there = {e["name"].lower() for e in elements} | {e.get("value", "").lower() for e in elements}
    name = rng.choice([n for n in ACTIONS + FIELDS + OPTIONS + SECTIONS if n.lower() not in there])
    thing = "button" if name in ACTIONS else "field" if name in FIELDS else "option"
    text = rng.choice((f"{name} {thing}", f'"{name}"', f'the "{name}" {thing}', name.lower()))
    yield Ask(rng.choice(("point", "detect")), "absent", text)
    ways = ('Is there a {t} "{n}"?', 'Does the page have a {t} "{n}"?', "Can I see a {n} {t}?")
    yield Ask("query", "absent", vary(rng, ways, n=name, t=thing), "no")
    shown = rng.choice(
        [e for e in elements if e["role"] in ("button", "input", "checkbox")] or elements
    )
    thing = SPOKEN.get(shown["role"], ("text",))[0]
    if thing != "icon":
        yield Ask("query", "screens present", vary(rng, ways, n=shown["name"], t=thing), "yes")
