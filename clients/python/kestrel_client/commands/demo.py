"""``demo``: starts a server, asks its model about some pictures, prints the answers and draws them on the pictures."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from kestrel_client import KestrelClient, KestrelError, QueryResult, Result
from kestrel_client.drawing.marks import Marks
from kestrel_client.drawing.paint import draw

from .files import file_errors
from .flag_table import add_flags
from .own_server import own_server
from .parser import CommandError
from .samples import Ask, Sample, samples

_FLAGS = """
    --output FOLDER  folder for the drawn images [=out]
    --model NAME     model to serve [=kestrel-small]
"""
_TILE = 640  # pixels a side


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "The questions are those that kestrel-small was taught; another model may answer in other words."
    add_flags(parser, _FLAGS)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.output)
    with file_errors("create the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    # SIGTERM then ends the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"$ kestrel-grpc serve --model {args.model}", flush=True)
    with own_server(["--model", args.model]) as (address, ready):
        print(ready, flush=True)
        try:
            with KestrelClient(address) as client:
                drawn = {sample.name: _show(client, sample) for sample in samples()}
        except KestrelError as error:
            raise CommandError(str(error)) from None
    with file_errors("write the images into", folder):
        for name, image in {**drawn, "demo": _sheet(list(drawn.values())[:4])}.items():
            image.save(folder / f"{name}.png")
    print(f"\nThe drawn images are in {folder}/.")
    return 0


def _show(client: KestrelClient, sample: Sample) -> Image.Image:
    """Ask all about a picture. Returns it with what was found and said."""
    print(f"\n{sample.file.name}")
    marks, waits = Marks(), []
    for ask in sample.asks:
        result = ask_about(client, sample, ask)
        print(f"  {line_of(ask, result)}", flush=True)
        found = replace(result.marks, text=())
        written = () if found.boxes else (f"{_asked(ask)}  {_answer_of(result)}",)
        marks += found + Marks(points=(ask.at,) if ask.at else (), text=written)
        waits.append(result.timings.ttft_ms)
    mean = sum(waits[1:]) / len(waits[1:])
    print(f"  first token after {waits[0]:.0f} ms, of a further question after {mean:.0f} ms")
    return draw(marks, sample.file)


def ask_about(client: KestrelClient, sample: Sample, ask: Ask) -> Result:
    options: dict[str, Any] = {}
    if ask.skill in ("query", "caption"):
        options["temperature"] = 0.0
    if ask.at:
        options["spatial_refs"] = [ask.at]
    result: Result = getattr(client, ask.skill)(sample.file, ask.text, **options)
    return result


def line_of(ask: Ask, result: Result) -> str:
    return f"{ask.skill:<8} {_asked(ask):<42} {_answer_of(result)}"


def _answer_of(result: Result) -> str:
    """The answer, or in pixels where the objects are."""
    if isinstance(result, QueryResult):
        return result.answer
    marks, size = result.marks, result.image_size or (0, 0)
    points = [str(point.to_pixels(size)) for point in marks.points]
    boxes = [str(box.to_pixels(size)) for box, _ in marks.boxes]
    return ", ".join(points + boxes) or "not found"


def _sheet(images: Sequence[Image.Image]) -> Image.Image:
    """The images in two columns, the next one in the shorter column."""
    heights, placed = [0, 0], []
    for image in images:
        tile = ImageOps.contain(image, (_TILE, _TILE))
        column = heights.index(min(heights))
        placed.append((tile, (column * _TILE, heights[column])))
        heights[column] += tile.height
    sheet = Image.new("RGB", (2 * _TILE, max(heights)), "white")
    for tile, place in placed:
        sheet.paste(tile, place)
    return sheet


def _asked(ask: Ask) -> str:
    return ask.text + (f" at ({ask.at.x:.2f}, {ask.at.y:.2f})" if ask.at else "")
