"""Charts by matplotlib, drawn when they are needed: no chart is seen twice."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.domains.charts.questions import number
from training.domains.ground import hsv, luma
from training.domains.picture import Box, Pixels, Point, view_scale
from training.domains.text.fonts import advance, draw_font, file_of
from training.domains.text.page import width_of

STYLES = "default default ggplot bmh seaborn-v0_8 seaborn-v0_8-whitegrid classic".split()


@dataclass(frozen=True)
class Plotted:
    """boxes: of bars, points or slices by series and label; characters: of all texts; scale: of the value axis."""

    pixels: Pixels
    boxes: list[list[Box]]
    characters: list[tuple[float, float, str]]
    scale: list[tuple[str, Point]]


def plot(
    rng: random.Random, table: dict[str, Any], width: int, height: int, held: bool = False
) -> Plotted:
    """The table as a chart of this size in pixels. Sets table["turn"], the turn of its labels in degrees."""
    # Only the machine that trains has matplotlib.
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure

    # Of the letters, in pixels; a point is a pixel.
    size = rng.uniform(10, rng.choice((14, 16, 24))) / view_scale(width, height)
    large, gap = size * rng.uniform(1, 1.5), size * rng.choice((0.5, 0.5, rng.uniform(0.5, 2)))
    font = draw_font(rng, held)
    widest = max(width_of(label, font, round(size)) for label in table["labels"])
    beside = len(table["series"]) > 1 and rng.random() < 0.7
    upright = widest * len(table["labels"]) > (0.45 if beside else 0.7) * width
    table["turn"] = (45 if rng.random() < 0.5 else 90) if upright else 0
    chosen = "dark_background" if table["dark"] else rng.choice(STYLES)
    with (
        style.context(chosen),
        rc_context({"font.family": _family(font), "font.size": size, "axes.unicode_minus": False}),
    ):
        figure = Figure((width / 72, height / 72), dpi=72)
        axes = figure.add_axes((0, 0, 1, 1))
        seen = [c for c in table["colours"] if not table["dark"] or luma(to_rgb(c)) > 0.25]
        axes.set_prop_cycle(color=seen or table["colours"])
        axes.tick_params(labelsize=size)
        if rng.random() < 0.4:
            axes.tick_params(length=0)
        if not table["dark"] and rng.random() < 0.5:
            for part in (figure, axes):
                part.set_facecolor([v / 255 for v in hsv(rng, (0, 0.12), (0.88, 1))])
        {"pie": _pie, "bar": _bars}.get(table["kind"], _points)(rng, axes, table, size)
        if table["title"]:
            loc = rng.choice(("center", "center", "left"))
            axes.set_title(table["title"], fontsize=large, loc=loc, y=1, pad=gap)  # type: ignore[arg-type]
        if len(table["series"]) > 1:
            axes.legend(fontsize=size, loc="upper left" if beside else "best", frameon=rng.random() < 0.5,
                        **({"bbox_to_anchor": (1, 1)} if beside else {}))  # fmt: skip
        top = 1.3 * large + gap if table["title"] else 0
        edges = _edges(table, lambda text: width_of(text, font, 20) * size / 20, size, top, beside)
        pad, canvas = rng.uniform(0.4, 1.2) * size, FigureCanvasAgg(figure)
        for _ in range(2):
            _lay_out(axes, table, edges + pad)
            canvas.draw()
            texts = [(text, text.get_window_extent()) for text in _texts(axes)]
            over = np.array([(-e.x0, -e.y0, e.x1 - width, e.y1 - height) for _, e in texts])
            if (over := over.max(0, initial=0)).max() <= 0:
                break
            edges = edges + over + 1
        pixels = np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:height, :width, :3])
        characters = [c for text, e in texts for c in _characters(text, e, font, height)]
    scale = [] if table["kind"] == "pie" else _scale(axes, table["lying"], height)
    return Plotted(pixels, _boxes(axes, table, height), characters, scale)


def _edges(
    t: dict[str, Any], wide: Callable[[str], float], size: float, top: float, beside: bool
) -> NDArray[np.float64]:
    """Pixels [4] that the texts outside of the axes need: left, bottom, right, top.

    matplotlib's own layout measures each text twice, which takes a third of a chart's time.
    """
    labels = max(map(wide, t["labels"]))
    if t["kind"] == "pie":
        legend = (0, 0, labels + 4 * size, top)
        return np.array(legend if t["keyed"] else (labels, size, labels, top + size))
    most = max(v for s in t["series"] for v in s["values"])
    numbers = wide("0" * len(str(int(1.3 * most))) + (".0" if most < 40 else "")) + 0.5 * size
    high = labels if t["turn"] == 90 else 0.71 * (labels + size) if t["turn"] else size
    below, left = (size, labels) if t["lying"] else (high, numbers)
    under, aside = ("value_axis", "label_axis") if t["lying"] else ("label_axis", "value_axis")
    left += size * (2 if t[aside] else 0.5)
    below += size * (2 if t[under] else 0.6)
    right = 3.8 * size + max(wide(s["name"]) for s in t["series"]) if beside else 0.5 * size
    top = max(top, 0.5 * size) + (0.6 * size if t["numbers"] else 0)
    return np.array((left, below, right, top))


def _lay_out(axes: Any, t: dict[str, Any], edges: NDArray[np.float64]) -> None:
    """Leave these edges around the axes, and put the axes' names at the picture's edge."""
    figure = axes.figure
    width, height = figure.bbox.size
    left, bottom, right, top = edges.tolist()
    wide, high = max(width - left - right, 0.3 * width), max(height - bottom - top, 0.3 * height)
    axes.set_position((left / width, bottom / height, wide / width, high / height))
    if t["kind"] != "pie":
        line = 1.3 * axes.yaxis.label.get_fontsize()
        middle = (left + wide / 2) / width, (bottom + high / 2) / height
        axes.xaxis.set_label_coords(middle[0], line / height, figure.transFigure)
        axes.yaxis.set_label_coords(line / width, middle[1], figure.transFigure)


@cache
def _fallback() -> list[Any]:
    from matplotlib.font_manager import fontManager

    return [entry for entry in fontManager.ttflist if entry.name == "DejaVu Sans"][:1]


def _family(font: str) -> str:
    """Makes a font known to matplotlib, and no other: it compares all that it knows. The files bear no names."""
    from matplotlib.font_manager import FontEntry, fontManager

    entry = FontEntry(fname=file_of(font), name=font, weight=400, size="scalable")
    fontManager.ttflist[:] = [*_fallback(), entry]
    return font


def _ticks(axis: Any) -> list[Any]:
    """Those that are drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]


def _scale(axes: Any, across: bool, height: int) -> list[tuple[str, Point]]:
    """Each number beside the value axis with its middle, at the tick's own place along the axis."""
    found = []
    for tick in _ticks(axes.xaxis if across else axes.yaxis):
        extent, at = tick.label1.get_window_extent(), tick.get_loc()
        x, y = axes.transData.transform((at, at))
        x, y = (x, (extent.y0 + extent.y1) / 2) if across else ((extent.x0 + extent.x1) / 2, y)
        found.append((tick.label1.get_text(), (float(x), float(height - y))))
    return found


def _texts(axes: Any) -> list[Any]:
    from matplotlib.text import Text

    hidden = {tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_major_ticks()}
    hidden -= {tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in _ticks(axis)}
    texts = [text for text in axes.figure.findobj(Text) if text not in hidden]
    return [t for t in texts if t.get_visible() and t.get_text()]


def _characters(text: Any, extent: Any, font: str, height: int) -> list[tuple[float, float, str]]:
    """A text's characters with their centres, also where it is turned."""
    turn = math.radians(text.get_rotation())
    x, y = (extent.x0 + extent.x1) / 2, height - (extent.y0 + extent.y1) / 2
    dx, dy = math.cos(turn), math.sin(turn)
    widths = [advance(font, 20, c) * text.get_fontsize() / 20 for c in text.get_text()]
    found, at = [], -sum(widths) / 2
    for c, wide in zip(text.get_text(), widths, strict=True):
        if c != " ":
            found.append((x + (at + wide / 2) * dx, y - (at + wide / 2) * dy, c))
        at += wide
    return found


def _boxes(axes: Any, table: dict[str, Any], height: int) -> list[list[Box]]:
    """matplotlib counts from the lower edge."""
    if table["kind"] == "bar":
        return [
            [
                (e.x0, height - e.y1, e.x1, height - e.y0)
                for e in (bar.get_window_extent() for bar in row)
            ]
            for row in axes.containers
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
    colour = {"color": rng.choice(("white", "0.9", "0.8", "0.5"))} if rng.random() < 0.5 else {}
    lines = rng.choice(("both", "values", "values", "none"))
    axes.grid(False)
    if lines != "none":
        axis = "both" if lines == "both" else "x" if across else "y"
        axes.grid(True, axis=axis, **colour)
    axes.set_axisbelow(True)
    if max(v for s in t["series"] for v in s["values"]) >= 1000 and rng.random() < 0.5:
        brief = rng.random() < 0.4
        axis = axes.xaxis if across else axes.yaxis
        axis.set_major_formatter(lambda v, _: f"{v / 1000:g}k" if brief and v else f"{v:,.0f}")
    gone = rng.choice(
        ((), (), ("top", "right"), ("top", "right", "left"), ("top", "right", "left", "bottom"))
    )
    for side in gone:
        axes.spines[side].set_visible(False)


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
        axes.plot(series["values"], marker=marker, label=series["name"], markersize=size * rng.uniform(0.4, 0.8),
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
    t["keyed"] = t["hole"] or rng.random() < 0.3  # a legend in place of labels
    wedges, *_ = axes.pie(
        values,
        labels=None if t["keyed"] else t["labels"],
        startangle=rng.uniform(0, 360),
        autopct=(lambda _: next(texts)) if t["numbers"] else None,
        textprops={"fontsize": size},
        pctdistance=0.75,
        counterclock=rng.random() < 0.5,
        wedgeprops={"width": rng.uniform(0.45, 0.6)} if t["hole"] else None,
    )
    if t["keyed"]:
        axes.legend(wedges, t["labels"], fontsize=size, loc="center left", bbox_to_anchor=(1, 0.5))
