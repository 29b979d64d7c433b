"""Charts by matplotlib, drawn when they are needed: no chart is seen twice."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from training.domains.charts.questions import number
from training.domains.picture import Box, Pixels, view_scale
from training.domains.text.fonts import advance, draw_font, file_of
from training.domains.text.page import width_of

STYLES = "default default ggplot bmh seaborn-v0_8 seaborn-v0_8-whitegrid classic".split()


@dataclass(frozen=True)
class Plotted:
    """boxes: of bars, points or slices by series and label; characters: of texts that lie; end: of the value axis."""

    pixels: Pixels
    boxes: list[list[Box]]
    characters: list[tuple[float, float, str]]
    end: str


def plot(
    rng: random.Random, table: dict[str, Any], width: int, height: int, held: bool = False
) -> Plotted:
    """The table as a chart of this size in pixels. Sets table["turn"], the turn of its labels in degrees."""
    # Only the machine that trains has matplotlib.
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Of the letters, in pixels; a point is a pixel.
    size = rng.uniform(11, rng.choice((16, 24))) / view_scale(width, height)
    font = draw_font(rng, held)
    widest = max(width_of(label, font, round(size)) for label in table["labels"])
    upright = widest * len(table["labels"]) > 0.7 * width
    table["turn"] = (45 if rng.random() < 0.5 else 90) if upright else 0
    chosen = "dark_background" if table["dark"] else rng.choice(STYLES)
    with style.context(chosen), rc_context({"font.family": _family(font), "font.size": size}):
        figure = Figure((width / 72, height / 72), dpi=72, layout="tight")
        axes = figure.add_subplot()
        axes.set_prop_cycle(color=table["colours"])
        axes.tick_params(labelsize=size)
        {"pie": _pie, "bar": _bars}.get(table["kind"], _points)(rng, axes, table, size)
        if table["title"]:
            large, loc = size * rng.uniform(1, 1.5), rng.choice(("center", "center", "left"))
            axes.set_title(table["title"], fontsize=large, loc=loc)  # type: ignore[arg-type]
        if len(table["series"]) > 1:
            axes.legend(fontsize=size, loc="best" if rng.random() < 0.5 else "upper left",
                        **({"bbox_to_anchor": (1, 1)} if rng.random() < 0.7 else {}))  # fmt: skip
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:height, :width, :3])
        characters = [c for text in _texts(axes) for c in _characters(text, font, height)]
    ticks = [] if table["kind"] == "pie" else _ticks(axes.xaxis if table["lying"] else axes.yaxis)
    end = ticks[-1].label1.get_text() if ticks else ""
    return Plotted(pixels, _boxes(axes, table, height), characters, end)


@cache
def _family(font: str) -> str:
    """Makes a font known to matplotlib. The files bear no names."""
    from matplotlib.font_manager import FontEntry, fontManager

    fontManager.ttflist.append(
        FontEntry(fname=file_of(font), name=font, weight=400, size="scalable")
    )
    return font


def _ticks(axis: Any) -> list[Any]:
    """Those that are drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def _texts(axes: Any) -> list[Any]:
    from matplotlib.text import Text

    hidden = {tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()}
    hidden -= {tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in _ticks(axis)}
    texts = [text for text in axes.figure.findobj(Text) if text not in hidden]
    return [t for t in texts if t.get_visible() and t.get_text() and not t.get_rotation()]


def _characters(text: Any, font: str, height: int) -> list[tuple[float, float, str]]:
    """A text's characters with their centres."""
    extent = text.get_window_extent()
    said = text.get_text()
    widths = [advance(font, 20, c) for c in said]
    scale, at = extent.width / max(sum(widths), 1), extent.x0
    found = []
    for c, wide in zip(said, widths, strict=True):
        if c != " ":
            found.append((at + wide * scale / 2, height - (extent.y0 + extent.y1) / 2, c))
        at += wide * scale
    return found


def _boxes(axes: Any, table: dict[str, Any], height: int) -> list[list[Box]]:
    if table["kind"] == "bar":
        return [
            [_flipped(bar.get_window_extent(), height) for bar in row] for row in axes.containers
        ]
    spots, r = [], 4.0
    if table["kind"] == "pie":
        middles = np.radians([(w.theta1 + w.theta2) / 2 for w in axes.patches])
        at = 0.72 * np.stack((np.cos(middles), np.sin(middles)), 1)
        spots = [axes.transData.transform(at)]
    for line in axes.lines:
        r = max(line.get_markersize() / 2, 3)
        spots.append(axes.transData.transform(line.get_xydata()))
    return [
        [(x - r, height - y - r, x + r, height - y + r) for x, y in row.tolist()] for row in spots
    ]


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
