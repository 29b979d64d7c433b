"""What may be asked about a chart."""

from __future__ import annotations

import random

from training.domains.charts.chart import Chart
from training.domains.phrasing import absent_object, off_topic, vary
from training.domains.picture import Ask, centre, in_order
from training.domains.text import words as w


def _value_asks(rng: random.Random, c: Chart) -> list[Ask]:
    asks = []
    for _ in range(4):
        s, k = rng.randrange(len(c.series)), rng.randrange(len(c.categories))
        of = c.categories[k]
        if len(c.series) > 1:
            templates = (
                "What is the value of {s} for {k}?",
                "What is {s} in {k}?",
                "How much is {s} at {k}?",
            )
        else:
            templates = ("What is the value of {k}?", "What is the value for {k}?", "How much is {k}?", "{k}?",
                         "What value does {k} have?", "Value of {k}?")  # fmt: skip
        answer = c.say(c.values[s][k]) + ("%" if c.kind == "pie" else "")
        kind = "charts value shown" if c.shown else "charts value"
        asks.append(
            Ask("query", kind, vary(rng, templates, k=of, s=c.series[s]), answer, spelled=True)
        )
    row = c.values[0]
    k = rng.randrange(len(row))
    if len(c.series) == 1 and all(
        abs(v - row[k]) > 0.08 * max(row) for v in row[:k] + row[k + 1 :]
    ):
        templates = (
            "Which category has the value {v}?",
            "What has the value {v}?",
            "Which one is {v}?",
        )
        said = c.say(row[k]) + ("%" if c.kind == "pie" else "")
        text = vary(rng, templates, v=said)
        asks.append(Ask("query", "charts category", text, c.categories[k], spelled=True))
    order = sorted(range(len(row)), key=lambda i: row[i])
    if len(c.series) == 1 and row[order[-1]] > 1.04 * row[order[-2]]:
        templates = ("Which {n} is the highest?", "What has the highest value?", "Which category is the largest?",
                     "Where is the maximum?", "Which one is the biggest?")  # fmt: skip
        asks.append(
            Ask(
                "query",
                "charts label",
                vary(rng, templates, n="category"),
                c.categories[order[-1]],
                spelled=True,
            )
        )
    if len(c.series) == 1 and row[order[1]] > 1.04 * row[order[0]]:
        templates = (
            "Which category is the lowest?",
            "What has the lowest value?",
            "Which one is the smallest?",
        )
        asks.append(
            Ask("query", "charts label", vary(rng, templates), c.categories[order[0]], spelled=True)
        )
    if len(c.categories) > 1 and c.kind != "pie":
        i, j = rng.sample(range(len(row)), 2)
        if abs(row[i] - row[j]) > 0.05 * max(row) and len(c.series) == 1:
            templates = (
                "Is {a} higher than {b}?",
                "Is {a} larger than {b}?",
                "Is the value of {a} above {b}?",
            )
            answer = "yes" if row[i] > row[j] else "no"
            asks.append(
                Ask(
                    "query",
                    "charts compare",
                    vary(rng, templates, a=c.categories[i], b=c.categories[j]),
                    answer,
                )
            )
    if c.kind == "line" and len(c.series) == 1:
        fall = (row[-1] - row[0]) / max(row)
        if abs(fall) > 0.15:
            templates = (
                "What is the trend?",
                "Does the line rise or fall?",
                "Is it going up or down?",
                "Describe the trend.",
            )
            asks.append(
                Ask(
                    "query",
                    "charts trend",
                    vary(rng, templates),
                    "It rises." if fall > 0 else "It falls.",
                )
            )
    return asks


def _count_asks(rng: random.Random, c: Chart) -> list[Ask]:
    noun = {
        "bar": "bars",
        "grouped bar": "bars",
        "line": "lines",
        "pie": "slices",
        "scatter": "points",
    }[c.kind]
    number = {"grouped bar": len(c.series) * len(c.categories), "line": len(c.series)}.get(
        c.kind, len(c.boxes[0])
    )
    ways = ("How many {n} are there?", "How many {n} does the chart have?", "Count the {n}.")
    asks = [Ask("query", "charts count", vary(rng, ways, n=noun), str(number))]
    name = {"pie": "pie chart", "scatter": "scatter plot", "line": "line chart"}.get(
        c.kind, "bar chart"
    )
    ways = ("What kind of chart is this?", "Which type of chart is it?", "What is this?")
    asks.append(Ask("query", "charts kind", vary(rng, ways), f"a {name}"))
    return asks


def _place_asks(rng: random.Random, c: Chart, width: int) -> list[Ask]:
    s, k = rng.randrange(len(c.boxes)), rng.randrange(len(c.boxes[0]))
    noun = {"bar": "bar", "grouped bar": "bar", "pie": "slice", "line": "point"}.get(c.kind)
    asks = []
    if c.kind == "bar":
        name = c.categories[k]
        said = rng.choice((f"the bar of {name}", f"{name} bar", f"bar for {name}"))
        asks.append(Ask("detect", "charts detect", said, boxes=(c.boxes[0][k],)))
        boxes = tuple(in_order(c.boxes[0], width, centre))
        asks.append(
            Ask("detect", "charts detect", rng.choice(("bar", "bars", "all bars")), boxes=boxes)
        )
    elif c.kind == "scatter":
        boxes = tuple(in_order(c.boxes[0], width, centre))
        asks.append(
            Ask(
                "point",
                "charts point",
                rng.choice(("point", "points", "dots")),
                boxes=boxes,
                points=tuple(map(centre, boxes)),
            )
        )
    elif noun and (c.kind == "pie" or len(c.series) == 1):
        box = c.boxes[s][k]
        said = rng.choice((f"the {noun} of {c.categories[k]}", f"{c.categories[k]}"))
        if c.kind == "line":
            said = f"the {noun} of {c.categories[k]}"
        asks.append(Ask("point", "charts point", said, boxes=(box,), points=(centre(box),)))
    return asks


def _caption(c: Chart) -> Ask:
    name = {"pie": "A pie chart", "scatter": "A scatter plot", "line": "A line chart"}.get(
        c.kind, "A bar chart"
    )
    text = (
        f"{name} of {c.title}." if c.kind != "scatter" else f"{name} with {len(c.boxes[0])} points."
    )
    return Ask("caption", "charts caption", "short", text, spelled=True)


def asks_of(rng: random.Random, c: Chart, width: int, titled: bool) -> list[Ask]:
    asks = [] if c.kind == "scatter" else _value_asks(rng, c)
    asks += _count_asks(rng, c) + _place_asks(rng, c, width) + [_caption(c)] * titled
    if titled:
        templates = (
            "What is the title?",
            "What is the chart about?",
            "Read the title.",
            "What is the title of the chart?",
        )
        asks.append(Ask("query", "charts title", vary(rng, templates), c.title, spelled=True))
    if c.legend and len(c.series) > 1:
        k = rng.randrange(len(c.series))
        colour = c.colours[k][0]
        templates = ("Which series is {c}?", "What does {c} stand for?", "What is shown in {c}?")
        asks.append(
            Ask("query", "charts legend", vary(rng, templates, c=colour), c.series[k], spelled=True)
        )
        asks.append(
            Ask(
                "query",
                "charts colour",
                vary(rng, ("What colour is {s}?", "Which color is {s}?"), s=c.series[k]),
                colour,
            )
        )
    if c.end:
        templates = (
            "What is the largest number on the axis?",
            "Where does the axis end?",
            "Up to what value does the axis go?",
        )
        asks.append(Ask("query", "charts axis", vary(rng, templates), c.end, spelled=True))
    if c.kind == "scatter" and len(c.boxes[0]) >= 6:
        words = {"1": "It rises.", "-1": "It falls.", "0": "There is no trend."}
        asks.append(
            Ask(
                "query",
                "charts trend",
                vary(rng, ("What is the trend?", "Is there a trend?")),
                words[c.categories[0]],
            )
        )
    asks.append(off_topic(rng) if rng.random() < 0.2 else absent_object(rng))
    if c.kind != "scatter" and rng.random() < 0.4:
        missing = rng.choice([word for word in w.GOODS if word not in c.categories])
        asks.append(
            Ask(
                "query",
                "absent",
                vary(rng, ("What is the value of {k}?", "How much is {k}?"), k=missing),
                f"There is no {missing}.",
            )
        )
    return asks
