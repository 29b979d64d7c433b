"""The flags of ``bench``, and the stages that they state."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Sequence

from ..connection import add_connection_flags
from ..flag_table import add_flags
from ..flags import SettingsError
from ..requests.inputs import IMAGE_HELP
from ..values import between, number, seconds, whole
from .mix import SKILLS
from .sender import Stage

_IN_FLIGHT = 8
"""The default of --concurrency."""
_TIMES = ("latency", "ttft", "itl")
_MOST = 1e9
_MOST_STAGES = 100
_EPILOG = """Sends real requests to the server. Do not use it with a server that others need.

examples:
  %(prog)s                                             8 requests in flight for 10 seconds
  %(prog)s --concurrency 1,2,4,8,16,32 --output old.json
  %(prog)s --rate 2,4,8,16 --mix query=3,detect=1 --made-up 50 --unique-images 0.5 --output new.json
  %(prog)s --compare old.json new.json"""

ESSENTIAL = (
    *("--concurrency", "--rate", "--seconds", "--mix", "--question", "--object", "--max-tokens"),
    *("--made-up", "--unique-images", "--slo", "--json", "--output", "--compare"),
    *("--model", "--server"),
)
_LEVELS = "; give the levels to --concurrency or --rate, as 1,2,4,8"
_LIMITS = "; give --slo latency=4000,ttft=2500"
REMOVED = {
    **dict.fromkeys(("--max-concurrency", "--concurrency-step", "--start-concurrency"), _LEVELS),
    **dict.fromkeys(
        ("--max-rate", "--max-rps", "--rate-step", "--rps-step", "--start-rps"), _LEVELS
    ),
    "--stage-duration": "; give --seconds",
    **dict.fromkeys((f"--{name}-threshold-ms" for name in _TIMES), _LIMITS),
    "--error-threshold": _LIMITS,
    "--percentile": _LIMITS,
    "--processes": "; start one bench for each process and add their rates",
    "--arrivals": "; arrivals are random",
    "--label": "; name the file of --output",
    "--report": "; give --output FILE",
}
"""What to give in place of flags that were removed."""
_LOAD = """
    --concurrency N,...  closed loop: requests in flight, 1 to 65536; several numbers make stages, until one is
        overloaded [8]
    --rate R,...     open loop: requests per second; several numbers make stages, until one is overloaded
    --max-in-flight N  open loop: requests above this are not sent and count as failed [=1024]
    --seconds S      how long each stage is measured, 0.1 to 86400 [=10]
    --warm-up S      load before each stage that is not measured [a tenth of --seconds]
    --drain S        how long unfinished requests may take after a stage; then they count as failed [=30]
    --seed N         seed of arrivals, skills, questions and made-up images [=0]
"""
_REQUESTS = f"""
    --mix SKILL=SHARE,...  how often each skill is asked; skills are {", ".join(SKILLS)} [=query]
    --question TEXT...  question about each image; of several, one at random [What is in this image?]
    --object NAME...    object for point, detect and segment; of several, one at random [red circle]
    --max-tokens N      limit on the tokens of an answer [=32]
    --temperature T     of sampling [the server's]
    --unary             ask for whole answers instead of streams: no TTFT and ITL
    --made-up N         use this many made-up images
    --size WxH          size of made-up images [=640x480]
    --unique-images SHARE  share of requests, 0 to 1, whose image is new to the server: one of the images with a faint
        pattern [=0]
    --model MODEL       name of the model that must answer [the server's default model]
    --adapter NAME      adapter to apply [none]
    --max-crops N       limit on the tiles of an image, beside the overview; 1: the overview alone [the model's]
"""
_OUTPUT = """
    --slo NAME=MS,...  what a good request keeps, in milliseconds; a stage in which more than 5 % of the requests are
        not good is overloaded [=latency=4000,ttft=2500]
    --json           print JSON, times in milliseconds
    --output FILE    write all results as JSON
    --tolerance PERCENT  with --compare: exit with 1 if a figure is worse by more than this [=5]
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=f"{IMAGE_HELP} [a sample image]")
    load = parser.add_argument_group(
        "load",
        "A closed loop keeps requests in flight. An open loop (--rate) sends them at random times, as independent "
        "callers do, and measures each from the time when it was due.",
    )
    rate = between(0, _MOST, "a number of requests per second above 0", above=True)
    add_flags(
        load, _LOAD, concurrency=_levels(whole(1, 65536)), rate=_levels(rate), N=whole(),
        max_in_flight=whole(1, 65536), seconds=seconds(0.1, 86400), S=seconds(0, 3600),
    )  # fmt: skip
    share = between(0, 1, "a number from 0 to 1")
    add_flags(
        parser.add_argument_group("requests"), _REQUESTS, mix=_mix, N=whole(), T=number,
        made_up=whole(1, 10000), size=_size, SHARE=share,
    )  # fmt: skip
    parser.set_defaults(
        request_id=None, priority="low", cache_salt=None, background=None, region=None
    )
    output = parser.add_argument_group("output")
    add_flags(output, _OUTPUT, slo=_slo, tolerance=number)
    output.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="send nothing; compare two files of --output",
    )
    add_connection_flags(parser)


def stages_of(args: argparse.Namespace) -> Sequence[Stage]:
    """Raises SettingsError."""
    if args.rate and args.concurrency:
        raise SettingsError("--concurrency: --rate makes an open loop; leave out one of both")
    return [
        Stage(
            loop="open" if args.rate else "closed",
            level=level,
            window_s=args.seconds,
            warm_up_s=args.seconds / 10 if args.warm_up is None else args.warm_up,
            drain_s=args.drain,
            most_in_flight=args.max_in_flight,
            seed=f"{args.seed} {number}",
        )
        for number, level in enumerate(args.rate or args.concurrency or [_IN_FLIGHT])
    ]


def _levels(parse: Callable[[str], float]) -> Callable[[str], list[float]]:
    def levels(text: str) -> list[float]:
        parts = text.split(",")
        if len(parts) > _MOST_STAGES:
            raise ValueError(f"has {len(parts)} numbers, the limit is {_MOST_STAGES}")
        return [parse(part) for part in parts]

    return levels


def _mix(text: str) -> dict[str, float]:
    return _named_numbers(text, SKILLS, f"is no skill; the skills are {', '.join(SKILLS)}", "1")


def _slo(text: str) -> dict[str, float]:
    try:
        return _named_numbers(text, _TIMES, "is no time")
    except ValueError:
        raise ValueError("must be like ttft=500,itl=50,latency=4000, in milliseconds") from None


def _named_numbers(
    text: str, names: Collection[str], other: str, default: str = ""
) -> dict[str, float]:
    """Reads NAME=NUMBER,NAME=NUMBER. ``other``: what the error says of a name that is not one of ``names``."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in names:
            raise ValueError(f"{name!r} {other}")
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        try:
            found[name] = float(number or default)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < _MOST:
            raise ValueError(f"{number!r} is not a number above 0 and below {_MOST:g}")
    return found


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    width, height = (int(side) for side in found.groups()) if found else (0, 0)
    if not (16 <= width <= 8192 and 16 <= height <= 8192):
        raise ValueError("must be a width and a height from 16 to 8192, like 640x480")
    return width, height
