"""``watch``: runs tasks on every frame of a stream: the images of a folder, or JPEG images on standard input."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from kestrel_client import FrameResult
from kestrel_client.values.tasks import outcome_dict

from ..connection import add_connection_flags, connected
from ..flag_table import add_flags
from ..parser import EXIT_FAILED, CommandError
from ..values import whole
from .analyze import add_task_flags, tasks_of
from .flags import add_request_flags, request_options
from .inputs import Source, open_inputs
from .output import print_json

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
"""The first and the last bytes of a JPEG file."""
_MOST_BYTES = 32 * 1024 * 1024
_READ_BYTES = 65536

ESSENTIAL = (
    *("--query", "--caption", "--point", "--detect", "--segment", "--latency-budget"),
    *("--late", "--fps", "--in-flight", "--model", "--server"),
)


_FRAMES = """
    --latency-budget MS   milliseconds that a frame may wait; default: no frame is dropped
    --late {keep,overview}  compute late frames like all others, or with their overview only [=keep]
    --in-flight N         frames that are computed at the same time, at most 16 [2]
    --fps N               send at most this many frames a second [no limit]
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Prints a line of JSON for each frame. A camera:\n"
        "  ffmpeg -loglevel error -i /dev/video0 -f image2pipe -c:v mjpeg - | \\\n"
        "    %(prog)s - --detect person --latency-budget 300 --late overview\n"
        "Exits with 1 if a frame or a task fails."
    )
    parser.usage = f"{parser.prog} FRAMES TASK [TASK ...] [flags]"
    parser.add_argument(
        "frames",
        metavar="FRAMES",
        help="a folder or pattern, whose images are the frames in the order of their names; "
        "- for JPEG images one after the other on standard input",
    )
    add_task_flags(parser)
    frames = parser.add_argument_group("frames")
    add_flags(frames, _FRAMES, N=whole(1), MS=whole())
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    tasks = tasks_of(args)
    source = jpegs(sys.stdin.buffer) if args.frames == "-" else _files(args.frames)
    if args.fps is not None:
        source = _paced(source, args.fps)
    failed = False
    with connected(args) as client:
        stream = client.frames(
            tasks,
            source,
            latency_budget_ms=args.latency_budget,
            late=args.late,
            max_in_flight=args.in_flight,
            **request_options(args),
        )
        with stream:
            for frame in stream:
                print_json(_line(frame))
                failed |= frame.error is not None
                failed |= frame.analysis is not None and bool(frame.analysis.errors)
    return EXIT_FAILED if failed else 0


def _line(frame: FrameResult) -> dict[str, Any]:
    line: dict[str, Any] = {"frame": frame.frame_id}
    if isinstance(frame.source, str):
        line["image"] = frame.source
    if frame.analysis is not None:
        line["tasks"] = {key: outcome_dict(o) for key, o in frame.analysis.outcomes.items()}
    elif frame.error is not None:
        line |= outcome_dict(frame.error)
    else:
        line["dropped"] = frame.dropped
    work = (
        *("num_crops", "encoded_crops", "reused_crops", "overview_only", "repeated"),
        *("waited_ms", "total_ms"),
    )
    return {**line, **{name: getattr(frame, name) for name in work}}


def _files(name: str) -> Iterator[Source]:
    """Raises CommandError."""
    return iter([each.source for each in open_inputs([name])])


def _paced(source: Iterator[Source], fps: int) -> Iterator[Source]:
    due = time.monotonic()
    for frame in source:
        time.sleep(max(0.0, due - time.monotonic()))
        yield frame
        due = max(due + 1 / fps, time.monotonic())


def jpegs(stream: BinaryIO) -> Iterator[Source]:
    """The JPEG images that follow one another in a stream. They must not hold thumbnails, which are JPEG images too.

    Raises CommandError for other data, and for an image of more than 32 MiB."""
    held = b""
    while data := stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
        held += data
        while (end := held.find(_END)) >= 0:
            frame, held = held[: end + 2], held[end + 2 :]
            if not frame.startswith(_BEGIN):
                raise CommandError("standard input is not a stream of JPEG images")
            yield frame
        if len(held) > _MOST_BYTES or (held and not held.startswith(_BEGIN[: len(held)])):
            raise CommandError("standard input is not a stream of JPEG images of at most 32 MiB")
    if held:
        raise CommandError("standard input ends within an image")
