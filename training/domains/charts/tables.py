"""Random tables, and how a chart shows each."""

import random
from pathlib import Path
from typing import Any

from training.domains.screens.pages import FONTS as PAGE_FONTS
from training.domains.text import words as w
from training.sources import word_lists

MEASURES, GROUPS, PLACES, PALETTES = word_lists(Path(__file__).parent).values()
UNITS = {
    "Temperature": "°C", "Rainfall": "mm", "Weight": "kg", "Distance": "km", "Speed": "km/h", "Latency": "ms",
}  # fmt: skip
FONTS = ("sans-serif", "serif", "monospace", *PAGE_FONTS)


def _labels(r: random.Random) -> list[str]:
    """Eight labels that no list has: words, steps of time, or numbers."""
    u, first = r.random(), r.randint(1, 16)
    if u < 0.6:
        most = r.choice((8, 10, 14))
        return [*dict.fromkeys(w.title(r, most) for _ in range(8))]
    month = r.choice(w.MONTHS)
    dated = f"{month[:3]} {{}}", f"{{}} {month}", f"20{r.randint(10, 29)}-{{:02}}"
    form = r.choice((*dated, "{:02}:00", "Week {}", "Day {}", "{}"))
    return [form.format(first + k) if u < 0.9 else w.made_up(r) for k in range(8)]


def make_table(r: random.Random) -> dict[str, Any]:
    """A table with its title and axes, and the chart's kind, size in pixels, colours and options.

    ``labels`` name the rows; each of ``series`` has a name and a value for each label. A pie has one series.
    """
    kind = r.choice(("bar", "bar", "bar", "line", "line", "pie", "scatter"))
    group = r.choice(GROUPS).split(",")
    ordered = kind in ("line", "scatter") or r.random() < 0.4
    if r.random() < 0.25:
        first = r.randint(1980, 2018)
        group, ordered = [str(first + k) for k in range(8)], True
    elif r.random() < 0.5:  # any words, so that no label is known by heart
        group, ordered = list(dict.fromkeys(_labels(r))), True
    count = min(len(group), r.randint(3, 6 if kind == "pie" else 8))
    start = r.randint(0, len(group) - count)
    labels = group[start : start + count] if ordered else r.sample(group, count)
    many = 1 if kind == "pie" else r.choice((1, 1, 1, 2, 2, 3))
    named = [str(r.randint(1990, 2030)), *(w.title(r, 12) for _ in range(5))]
    named = [*PLACES] if r.random() < 0.4 else named
    names = r.sample([*dict.fromkeys(n for n in named if n not in labels)], many)
    measure = r.choice(MEASURES)
    scale = 10 ** r.choice((1, 1, 2, 2, 3, 4))
    digits = 1 if scale == 10 and r.random() < 0.4 else 0
    series: list[dict[str, Any]] = []
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
    unit, highest = UNITS.get(measure, ""), max(v for s in series for v in s["values"])
    titles = [w.title(r, 30), w.title(r), f"{measure} of {w.term(r)}", f"{measure} by {w.term(r)}"]
    where = f" in {r.choice(w.PLACES)}", f" in {r.randint(1990, 2026)}"
    titles = titles if r.random() < 0.75 else [measure, *(measure + each for each in where)]
    width, height = r.randint(38, 90) * 10, r.randint(28, 62) * 10
    return {
        "kind": kind,
        "title": r.choice(titles) if r.random() < 0.88 else "",
        "label_axis": r.choice(("", "", "Group", "Period", "Name", w.title(r, 16))),
        "value_axis": f"{measure} ({unit})" if unit else r.choice(("", measure)),
        "labels": labels, "series": series, "width": width, "height": height,
        "colours": r.sample(p := r.choice(PALETTES).split(), len(p)),
        "numbers": r.random() < 0.4, "lying": kind == "bar" and r.random() < 0.3, "smooth": r.random() < 0.25,
        "hole": r.random() < 0.35, "left": r.random() < 0.4, "dark": r.random() < 0.12, "font": r.choice(FONTS),
        "form": r.choice(("", "", "", ",", "k" if highest >= 1000 else "", "%", "$")),
        "ticks": r.randint(3, 16), "grid": r.random() < 0.6, "gap": r.choice((0.05, 0.1, 0.2, 0.3, 0.5)),
        "head": r.uniform(1, 1.7), "size": round(r.uniform(11, 18) * max(1, width / 640)),
    }  # fmt: skip
