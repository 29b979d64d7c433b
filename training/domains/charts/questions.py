"""What may be asked about a chart, from the table that it shows."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from training.domains.charts.tables import GROUPS, PLACES
from training.domains.phrasing import read, tell
from training.domains.picture import Ask
from training.domains.text.words import term, title
from training.scenes.phrases import WAYS

SPOKEN = {"bar": "bar chart", "line": "line chart", "pie": "pie chart", "scatter": "scatter plot"}
EXTREMES = ("highest", "lowest")
WORDS = {"highest": ("highest", "largest", "maximum"), "lowest": ("lowest", "smallest", "minimum")}
PARTS = {"bar": "bars", "pie": "slices", "line": "lines", "scatter": "points"}


def ask_about(
    rng: random.Random, table: dict[str, Any], domain: str, exact: bool = False
) -> list[Ask]:
    """All questions of a chart, in a random order. exact: values that aren't written are not rounded."""
    asks = [*_about_frame(rng, table, exact), *_about_values(rng, table, exact)]
    asks = [replace(ask, kind=f"{domain} {ask.kind}") for ask in asks]
    asks += [_absent(rng, table) for _ in range(1 if exact else 2)]
    rng.shuffle(asks)
    return asks


def number(value: float) -> str:
    return f"{value:g}" if value < 1e5 else str(int(value))


def readable(value: float) -> float:
    """As exact as a person reads it from an axis: the error is at most 1.25 %."""
    if value <= 0:
        return value
    power = 10.0 ** math.floor(math.log10(value))
    unit = power / (50 if value < 2 * power else 20 if value < 5 * power else 10)
    return round(round(value / unit) * unit, 6)


def extremes(values: Sequence[float], pie: bool = False) -> tuple[int | None, int | None]:
    """Where the largest and the least value are, if they stand out; angles are harder to compare than lengths."""
    order = sorted(range(len(values)), key=values.__getitem__)
    least, second, below, most = (values[order[k]] for k in (0, 1, -2, -1))
    by = 1.15 if pie else 1.06
    high = order[-1] if most >= by * below else None
    low = order[0] if second >= by * least + (0 if pie else 0.02 * most) else None
    return high, low


def labels_are_shown(table: dict[str, Any]) -> bool:
    """False where the axis had no room for each label: libraries then leave out some, ours don't."""
    written = dict(table.get("texts", ())) or table["labels"]
    return all(label in written for label in table["labels"])


def _about_frame(rng: random.Random, t: dict[str, Any], exact: bool) -> Iterator[Ask]:
    if exact or rng.random() < 0.4:
        yield tell(rng, "kind", WAYS["chart kind"], "a " + SPOKEN[t["kind"]])
    if t["title"] and (exact or rng.random() < 0.6):
        yield read(rng, "title", WAYS["chart title"], t["title"])
        about = f"A {SPOKEN[t['kind']]} of {t['title']}."
        yield Ask("caption", "caption", "short", about, spelled=True)
    names = [s["name"] for s in t["series"]]
    if len(names) > 1:
        yield read(rng, "legend", WAYS["legend"], ", ".join(names))
        yield tell(rng, "count", WAYS["count of series"], str(len(names)))
    if t["kind"] in ("bar", "pie"):
        count = len(t["labels"]) * len(names)
        yield tell(rng, "count", WAYS["count of parts"], str(count), p=PARTS[t["kind"]])
    if labels_are_shown(t):
        yield read(rng, "labels", WAYS["labels"], ", ".join(t["labels"]))


def _about_values(rng: random.Random, t: dict[str, Any], exact: bool) -> Iterator[Ask]:
    several, pie = len(t["series"]) > 1, t["kind"] == "pie"
    if not labels_are_shown(t):
        return
    can_be_read = not pie or t["numbers"]
    for s in t["series"]:
        pairs = list(zip(t["labels"], s["values"], strict=True))
        if can_be_read and len(pairs) * len(t["series"]) <= 10:
            listed = (f"{label} {number(v if t['numbers'] else readable(v))}" for label, v in pairs)
            o = f" of {s['name']}" if several else ""
            yield read(rng, "table", WAYS["table"], ", ".join(listed), o=o)
        for label, value in rng.sample(pairs, min(3, len(pairs))) if can_be_read else ():
            ways = WAYS["chart value of series" if several else "chart value"]
            said = number(value if exact or t["numbers"] else readable(value))
            kind = "value shown" if t["numbers"] else "value"
            yield read(rng, kind, ways, said, s=s["name"], l=label)
        yield from _about_series(rng, t, s, pairs)


def _about_series(
    rng: random.Random, t: dict[str, Any], s: dict[str, Any], pairs: list[tuple[str, float]]
) -> Iterator[Ask]:
    """The extremes of a series, and its trend."""
    several = len(t["series"]) > 1
    of = f" of {s['name']}" if several else ""
    stand_out = extremes(s["values"], t["kind"] == "pie" and not t["numbers"])
    for end, number in zip(EXTREMES, stand_out, strict=True):
        if number is not None:
            a, b, c = WORDS[end]
            ways = f"Which one has the {a} value{of}?|What is the {b}{of}?|Where is the {c}{of}?"
            yield read(rng, "label", ways, pairs[number][0])
    (start, first), (end, last) = pairs[0], pairs[-1]
    if t["kind"] == "line" and not 0.75 < last / max(first, 1e-9) < 1.33:
        said = "It rises." if last > first else "It falls."
        name = s["name"] if several else "it"
        yield tell(rng, "trend", WAYS["trend"], said, s=name, a=start, b=end)


def _absent(rng: random.Random, t: dict[str, Any]) -> Ask:
    """The value of a label, or of a series, that other charts have: the best are of the chart's own group."""
    series, groups = [s["name"] for s in t["series"]], [group.split(",") for group in GROUPS]
    there = {*t["labels"], *series, *t["title"].split()}
    near = [name for group in groups if len(there & {*group}) > 1 for name in group]
    listed = rng.choice(rng.choice(groups)), rng.choice(PLACES), str(rng.randint(1980, 2026))
    names = [*rng.sample(near, min(3, len(near))), *listed, term(rng).capitalize(), title(rng, 12)]
    other = rng.choice([name for name in names if name not in there] or ["Atlantis"])
    if len(series) == 1 or rng.random() < 0.3:
        return tell(rng, "absent", WAYS["chart value"], f"There is no {other}.", l=other)
    s, label = (
        (other, rng.choice(t["labels"])) if rng.random() < 0.5 else (rng.choice(series), other)
    )
    return tell(rng, "absent", WAYS["chart value of series"], f"There is no {other}.", s=s, l=label)
