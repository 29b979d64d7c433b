"""Charts by matplotlib, drawn when they are needed: no chart is seen twice."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from training.domains.picture import Box, Pixels, view_scale
from training.domains.webcharts.questions import number

STYLES = "default default ggplot bmh seaborn-v0_8 seaborn-v0_8-whitegrid classic".split()
FAMILIES = ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono", "STIXGeneral")


def plot(
    rng: random.Random, table: dict[str, Any], width: int, height: int
) -> tuple[Pixels, list[list[Box]]]:
    """The table as a chart of this size in pixels, and the boxes of its bars or points by series and label.

    Sets table["turn"], the turn of its labels in degrees.
    """
    # Only the machine that trains has matplotlib.
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = rng.uniform(11, rng.choice((16, 24))) / view_scale(
        width, height
    )  # of the letters, in pixels
    longest = max(map(len, table["labels"]))
    upright = longest * len(table["labels"]) * size * 0.62 > 0.7 * width
    table["turn"] = (45 if rng.random() < 0.5 else 90) if upright else 0
    chosen = "dark_background" if table["dark"] else rng.choice(STYLES)
    with (
        style.context(chosen),
        rc_context({"font.family": rng.choice(FAMILIES), "font.size": size}),
    ):
        figure = Figure((width / 72, height / 72), dpi=72, layout="tight")  # a point is a pixel
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=table["colours"])
        axes.tick_params(labelsize=size)
        {"pie": _pie, "bar": _bars}.get(table["kind"], _points)(rng, axes, table, size)
        if table["title"]:
            large, loc = size * rng.uniform(1, 1.5), rng.choice(("center", "center", "left"))
            axes.set_title(table["title"], fontsize=large, loc=loc)
        if len(table["series"]) > 1:
            axes.legend(fontsize=size, loc="best" if rng.random() < 0.5 else "upper left",
                        **({"bbox_to_anchor": (1, 1)} if rng.random() < 0.7 else {}))  # fmt: skip
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3]
        boxes = [
            [_flipped(bar.get_window_extent(), height) for bar in row] for row in axes.containers
        ]
        for line in axes.lines if not boxes else ():
            r = max(line.get_markersize() / 2, 3)
            spots = axes.transData.transform(line.get_xydata())
            boxes.append(
                [(x - r, height - y - r, x + r, height - y + r) for x, y in spots.tolist()]
            )
    return np.ascontiguousarray(pixels[:height, :width]), boxes


def _flipped(extent: Any, height: int) -> Box:
    """matplotlib counts from the lower edge."""
    return extent.x0, height - extent.y1, extent.x1, height - extent.y0


def _frame(rng: random.Random, axes: Any, t: dict[str, Any], size: float, across: bool) -> None:
    """Labels, axis titles, grid and frame. across: the values run to the right."""
    places = list(range(len(t["labels"])))
    if across:
        axes.set_yticks(places, t["labels"])
        axes.invert_yaxis()
        axes.set_xlabel(t["value_axis"], fontsize=size)
        axes.set_ylabel(t["label_axis"], fontsize=size)
    else:
        align = "right" if t["turn"] == 45 else "center"
        axes.set_xticks(places, t["labels"], rotation=t["turn"], ha=align)
        axes.set_ylabel(t["value_axis"], fontsize=size)
        axes.set_xlabel(t["label_axis"], fontsize=size)
    axes.grid(rng.random() < 0.6, axis="x" if across else "y")
    axes.set_axisbelow(True)
    if rng.random() < 0.4:
        axes.spines[["top", "right"]].set_visible(False)


def _bars(rng: random.Random, axes: Any, t: dict[str, Any], size: float) -> None:
    many, fill = len(t["series"]), rng.uniform(0.5, 0.9)
    for k, series in enumerate(t["series"]):
        at = [i + fill * ((k + 0.5) / many - 0.5) for i in range(len(t["labels"]))]
        draw = axes.barh if t["lying"] else axes.bar
        bars = draw(at, series["values"], fill / many, label=series["name"])
        if t["numbers"]:
            texts = [number(v) for v in series["values"]]
            axes.bar_label(bars, texts, fontsize=size * 0.9, padding=2)
    axes.margins(**{"x" if t["lying"] else "y": 0.12 if t["numbers"] else 0.05})
    _frame(rng, axes, t, size, t["lying"])


def _points(rng: random.Random, axes: Any, t: dict[str, Any], size: float) -> None:
    marker = rng.choice("oos^D") if t["kind"] == "scatter" or rng.random() < 0.6 else ""
    for series in t["series"]:
        axes.plot(series["values"], marker=marker, label=series["name"], markersize=size * rng.uniform(0.3, 0.6),
                  linewidth=size / rng.uniform(5, 14), linestyle="" if t["kind"] == "scatter" else "-")  # fmt: skip
        if t["numbers"] and len(t["series"]) == 1:
            for i, v in enumerate(series["values"]):
                above = {"xytext": (0, size * 0.5), "textcoords": "offset points", "ha": "center"}
                axes.annotate(number(v), (i, v), fontsize=size * 0.9, **above)
    axes.margins(0.08, 0.15)
    if rng.random() < 0.7:
        axes.set_ylim(bottom=0)
    _frame(rng, axes, t, size, False)


def _pie(rng: random.Random, axes: Any, t: dict[str, Any], size: float) -> None:
    values = t["series"][0]["values"]
    texts = iter([number(v) for v in values])
    wedges, *_ = axes.pie(
        values,
        labels=None if t["hole"] else t["labels"],
        startangle=rng.uniform(0, 360),
        autopct=(lambda _: next(texts)) if t["numbers"] else None,
        textprops={"fontsize": size},
        pctdistance=0.75,
        wedgeprops={"width": rng.uniform(0.45, 0.6)} if t["hole"] else None,
    )
    if t["hole"]:
        axes.legend(wedges, t["labels"], fontsize=size, loc="center left", bbox_to_anchor=(1, 0.5))
