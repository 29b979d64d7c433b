"""Random tables, and how a chart shows each."""

from __future__ import annotations

import random
from typing import Any

from training.domains.screens.pages import FONTS as PAGE_FONTS
from training.domains.text.words import dictionary

MEASURES = (
    "Sales|Revenue|Profit|Visitors|Orders|Users|Output|Rainfall|Temperature|Population|Exports|Imports|Budget|Cost|Score|"
    "Downloads|Votes|Members|Energy use|Speed|Weight|Distance|Price|Production|Attendance|Stock|Calls|Errors|Latency"
).split("|")
UNITS = {
    "Temperature": "°C", "Rainfall": "mm", "Weight": "kg", "Distance": "km", "Speed": "km/h", "Latency": "ms",
}  # fmt: skip
GROUPS = (
    "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec",
    "Mon|Tue|Wed|Thu|Fri|Sat|Sun",
    "Q1|Q2|Q3|Q4",
    "North|South|East|West|Centre",
    "Apples|Pears|Plums|Cherries|Grapes|Melons|Lemons|Figs",
    "Norway|Sweden|Denmark|Finland|Iceland|Estonia|Latvia|Poland|Spain|Italy|France|Greece|Ireland|Austria",
    "Oslo|Paris|Rome|Madrid|Berlin|Vienna|Prague|Lisbon|Dublin|Athens|Warsaw|Helsinki",
    "Books|Games|Music|Films|Toys|Tools|Shoes|Hats|Bags|Lamps",
    "Red|Blue|Green|Yellow|Black|White|Orange|Purple",
    "Coal|Gas|Oil|Wind|Solar|Hydro|Nuclear",
    "Web|Mobile|Desktop|Tablet|Phone|Email|Store",
    "A|B|C|D|E|F|G|H",
    "Cats|Dogs|Birds|Fish|Horses|Rabbits|Mice",
    "Rice|Wheat|Maize|Barley|Oats|Rye|Soy",
)
PLACES = (
    "2023|2024|2025|Plan|Actual|Last year|This year|Team A|Team B|Online|In store|Men|Women|Day|Night"
).split("|")
PALETTES = (
    "#4e79a7 #f28e2b #e15759 #76b7b2 #59a14f #edc948 #b07aa1 #ff9da7 #9c755f #bab0ac",
    "#1b9e77 #d95f02 #7570b3 #e7298a #66a61e #e6ab02 #a6761d #666666",
    "#003f5c #58508d #bc5090 #ff6361 #ffa600 #2f9e44 #1c7ed6 #868e96",
    "#0072b2 #e69f00 #009e73 #cc79a7 #56b4e9 #d55e00 #f0e442 #999999",
    "#264653 #2a9d8f #e9c46a #f4a261 #e76f51 #8d99ae #6a4c93 #1982c4",
)
FONTS = ("sans-serif", "serif", "monospace", *PAGE_FONTS)


def make_table(r: random.Random) -> dict[str, Any]:
    """A table with its title and axes, and the chart's kind, size in pixels, colours and options.

    ``labels`` name the rows; each of ``series`` has a name and a value for each label. A pie has one series.
    """
    kind = r.choice(("bar", "bar", "bar", "line", "line", "pie", "scatter"))
    group = r.choice(GROUPS).split("|")
    ordered = kind in ("line", "scatter") or r.random() < 0.4
    if r.random() < 0.25:
        first = r.randint(1980, 2018)
        group, ordered = [str(first + k) for k in range(8)], True
    elif r.random() < 0.5:  # any words, so that no label is known by heart
        group, ordered = [word.capitalize()[:9] for word in r.sample(dictionary(), 8)], True
        group = list(dict.fromkeys(group))
    count = min(len(group), r.randint(3, 6 if kind == "pie" else 8))
    start = r.randint(0, len(group) - count)
    labels = group[start : start + count] if ordered else r.sample(group, count)
    many = 1 if kind == "pie" else r.choice((1, 1, 1, 2, 2, 3))
    names = r.sample(PLACES, many)
    measure = r.choice(MEASURES)
    scale = 10 ** r.choice((1, 1, 2, 2, 3, 4))
    digits = 1 if scale == 10 and r.random() < 0.4 else 0
    series = []
    for name in names:
        level, values = r.uniform(0.2, 1), []
        for _ in labels:
            if r.random() < 0.5 and kind == "line":
                level = min(1, max(0.05, level + r.uniform(-0.2, 0.2)))
            else:
                level = r.uniform(0.08, 1)
            value = round(level * scale * r.choice((0.9, 0.95, 1)), digits)
            values.append(value if digits else int(value) or 1)
        series.append({"name": name if many > 1 else measure, "values": values})
    unit = UNITS.get(measure, "")
    place = r.choice(("", "", f" in {r.randint(1990, 2026)}", " by group", " per item", " (total)"))
    width, height = r.randint(38, 90) * 10, r.randint(28, 62) * 10
    return {
        "kind": kind,
        "title": f"{measure}{place}" if r.random() < 0.85 else "",
        "label_axis": r.choice(("", "", "Group", "Period", "Name")),
        "value_axis": f"{measure} ({unit})" if unit else r.choice(("", measure)),
        "labels": labels,
        "series": series,
        "width": width,
        "height": height,
        "colours": r.sample(p := r.choice(PALETTES).split(), len(p)),
        "numbers": r.random() < 0.4,
        "lying": kind == "bar" and r.random() < 0.3,
        "smooth": r.random() < 0.25,
        "hole": r.random() < 0.35,
        "left": r.random() < 0.4,
        "dark": r.random() < 0.12,
        "font": r.choice(FONTS),
        "size": round(r.uniform(11, 18) * max(1, width / 640)),
    }
