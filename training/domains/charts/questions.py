"""What may be asked about a chart."""

from __future__ import annotations

import random

from training.domains.charts.chart import Chart
from training.domains.phrasing import absent_object, off_topic, read, tell
from training.domains.picture import Ask, centre, find, in_order
from training.domains.text import words as w

_NAMES = {"pie": "pie chart", "scatter": "scatter plot", "line": "line chart"}  # or bar chart
_MARKS = {"line": "lines", "pie": "slices", "scatter": "points"}  # or bars


def asks_of(rng: random.Random, c: Chart, width: int, titled: bool) -> list[Ask]:
    asks = [] if c.kind == "scatter" else _value_asks(rng, c) + _comparisons(rng, c)
    asks += _count_asks(rng, c) + _place_asks(rng, c, width)
    if titled:
        asks.append(_caption(c))
        ways = "What is the title?|What is the chart about?|Read the title.|What is the title of the chart?"
        asks.append(read(rng, "charts title", ways, c.title))
    if c.legend and len(c.series) > 1:
        k = rng.randrange(len(c.series))
        colour = c.colours[k][0]
        ways = "Which series is {c}?|What does {c} stand for?|What is shown in {c}?"
        asks.append(read(rng, "charts legend", ways, c.series[k], c=colour))
        ways = "What colour is {s}?|Which color is {s}?"
        asks.append(tell(rng, "charts colour", ways, colour, s=c.series[k]))
    if c.end:
        ways = (
            "What is the largest number on the axis?|Where does the axis end?|"
            "Up to what value does the axis go?"
        )
        asks.append(read(rng, "charts axis", ways, c.end))
    if c.kind == "scatter" and len(c.boxes[0]) >= 6:
        words = {"1": "It rises.", "-1": "It falls.", "0": "There is no trend."}
        ways = "What is the trend?|Is there a trend?"
        asks.append(tell(rng, "charts trend", ways, words[c.categories[0]]))
    asks.append(off_topic(rng) if rng.random() < 0.2 else absent_object(rng))
    if c.kind != "scatter" and rng.random() < 0.4:
        missing = rng.choice([word for word in w.GOODS if word not in c.categories])
        ways = "What is the value of {k}?|How much is {k}?"
        asks.append(tell(rng, "absent", ways, f"There is no {missing}.", k=missing))
    return asks


def _value_asks(rng: random.Random, c: Chart) -> list[Ask]:
    asks = []
    percent = "%" if c.kind == "pie" else ""
    for _ in range(4):
        s, k = rng.randrange(len(c.series)), rng.randrange(len(c.categories))
        if len(c.series) > 1:
            ways = "What is the value of {s} for {k}?|What is {s} in {k}?|How much is {s} at {k}?"
        else:
            ways = (
                "What is the value of {k}?|What is the value for {k}?|How much is {k}?|{k}?|"
                "What value does {k} have?|Value of {k}?"
            )
        kind = "charts value shown" if c.shown else "charts value"
        said = c.say(c.values[s][k]) + percent
        asks.append(read(rng, kind, ways, said, k=c.categories[k], s=c.series[s]))
    row = c.values[0]
    k = rng.randrange(len(row))
    others = row[:k] + row[k + 1 :]
    if len(c.series) == 1 and all(abs(v - row[k]) > 0.08 * max(row) for v in others):
        ways = "Which category has the value {v}?|What has the value {v}?|Which one is {v}?"
        asks.append(read(rng, "charts category", ways, c.categories[k], v=c.say(row[k]) + percent))
    return asks


def _comparisons(rng: random.Random, c: Chart) -> list[Ask]:
    """About the one series of a chart: its extremes, two of its values, its trend."""
    asks, row, single = [], c.values[0], len(c.series) == 1
    order = sorted(range(len(row)), key=lambda i: row[i])
    if single and row[order[-1]] > 1.04 * row[order[-2]]:
        ways = (
            "Which {n} is the highest?|What has the highest value?|Which category is the largest?|"
            "Where is the maximum?|Which one is the biggest?"
        )
        asks.append(read(rng, "charts label", ways, c.categories[order[-1]], n="category"))
    if single and row[order[1]] > 1.04 * row[order[0]]:
        ways = "Which category is the lowest?|What has the lowest value?|Which one is the smallest?"
        asks.append(read(rng, "charts label", ways, c.categories[order[0]]))
    if c.kind != "pie":
        i, j = rng.sample(range(len(row)), 2)
        if single and abs(row[i] - row[j]) > 0.05 * max(row):
            ways = "Is {a} higher than {b}?|Is {a} larger than {b}?|Is the value of {a} above {b}?"
            said = "yes" if row[i] > row[j] else "no"
            asks.append(
                tell(rng, "charts compare", ways, said, a=c.categories[i], b=c.categories[j])
            )
    fall = (row[-1] - row[0]) / max(row)
    if single and c.kind == "line" and abs(fall) > 0.15:
        ways = (
            "What is the trend?|Does the line rise or fall?|Is it going up or down?|"
            "Describe the trend."
        )
        asks.append(tell(rng, "charts trend", ways, "It rises." if fall > 0 else "It falls."))
    return asks


def _count_asks(rng: random.Random, c: Chart) -> list[Ask]:
    count = {"grouped bar": len(c.series) * len(c.categories), "line": len(c.series)}
    number = count.get(c.kind, len(c.boxes[0]))
    ways = "How many {n} are there?|How many {n} does the chart have?|Count the {n}."
    asks = [tell(rng, "charts count", ways, str(number), n=_MARKS.get(c.kind, "bars"))]
    ways = "What kind of chart is this?|Which type of chart is it?|What is this?"
    return [*asks, tell(rng, "charts kind", ways, f"a {_NAMES.get(c.kind, 'bar chart')}")]


def _place_asks(rng: random.Random, c: Chart, width: int) -> list[Ask]:
    s, k = rng.randrange(len(c.boxes)), rng.randrange(len(c.boxes[0]))
    if c.kind == "bar":
        name = c.categories[k]
        said = rng.choice((f"the bar of {name}", f"{name} bar", f"bar for {name}"))
        every = rng.choice(("bar", "bars", "all bars"))
        return [
            find("detect", "charts detect", said, [c.boxes[0][k]]),
            find("detect", "charts detect", every, in_order(c.boxes[0], width, centre)),
        ]
    if c.kind == "scatter":
        said = rng.choice(("point", "points", "dots"))
        return [find("point", "charts point", said, in_order(c.boxes[0], width, centre))]
    if c.kind != "pie" and len(c.series) > 1:
        return []
    name, noun = c.categories[k], "slice" if c.kind == "pie" else "point"
    said = rng.choice(
        (f"the {noun} of {name}", name if c.kind == "pie" else f"the point of {name}")
    )
    return [find("point", "charts point", said, [c.boxes[s][k]])]


def _caption(c: Chart) -> Ask:
    name = f"A {_NAMES.get(c.kind, 'bar chart')}"
    about = f"with {len(c.boxes[0])} points" if c.kind == "scatter" else f"of {c.title}"
    return Ask("caption", "charts caption", "short", f"{name} {about}.", spelled=True)
