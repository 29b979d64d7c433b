"""The flags of ``bench``, and the plan that they state."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping
from typing import TypeAlias

from ..connection import add_connection_flags
from ..flag_table import add_flags
from ..flags import SettingsError
from ..requests.inputs import IMAGE_HELP
from ..values import between, number, seconds, whole
from .sending.mix import SKILLS
from .stages import Limits, Ramp, Slo

IN_FLIGHT = 8
"""The default of --concurrency."""
_TIMES = ("latency", "ttft", "itl")
_Limits: TypeAlias = tuple[float | None, float | None, float | None]
"""In the order of _TIMES, in seconds; None: no limit."""
_MOST = 1e9
_EPILOG = """Sends real requests to the server. Do not use it with a server that others need.

examples:
  %(prog)s                                             8 requests in flight for 10 seconds
  %(prog)s --start-concurrency 1 --max-concurrency 64 --report load.html
  %(prog)s --rate 2 --max-rate 100 --mix query=3,detect=1 --made-up 50 --unique-images 0.5 --output new.json
  %(prog)s --compare old.json new.json --report both.html"""

ESSENTIAL = (
    *("--concurrency", "--max-concurrency", "--rate", "--max-rate", "--seconds"),
    *("--mix", "--question", "--object", "--max-tokens", "--made-up"),
    *("--unique-images", "--slo", "--json", "--output", "--report", "--compare"),
    *("--model", "--server"),
)
_LOAD = """
    --concurrency, --start-concurrency N  closed loop: requests in flight in the first stage, 1 to 65536 [8]
    --max-concurrency N   closed loop: raise the requests in flight to this, until a limit is passed [one stage]
    --concurrency-step N  closed loop: requests in flight that each stage adds [each stage has twice as many]
    --rate, --start-rps R  open loop: requests per second in the first stage
    --max-rate, --max-rps R    open loop: raise the rate to this, until a limit is passed [one stage]
    --rate-step, --rps-step R  open loop: requests per second that each stage adds [each stage has twice as many]
    --arrivals {poisson,steady}  open loop: random gaps, or equal ones [=poisson]
    --max-in-flight N  open loop: requests above this are not sent and count as failed [=1024]
    --seconds, --stage-duration S  how long each stage is measured, 0.1 to 86400 [=10]
    --warm-up S      load before each stage that is not measured [a tenth of --seconds]
    --drain S        how long unfinished requests may take after a stage; then they count as failed [=30]
    --processes N    client processes that share the load [=1]
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
_LIMITS = """
    --latency-threshold-ms MS  limit of the time of a whole answer, in milliseconds [=4000]
    --ttft-threshold-ms MS     limit of the time to the first token, in milliseconds [=2500]
    --itl-threshold-ms MS      limit of the time between tokens, in milliseconds [none]
    --error-threshold SHARE    limit of the share of requests that fail, 0 to 1 [=0.1]
    --percentile P   the percentile of times that the limits mean [=95]
    --slo NAME=MS,...  what a good request keeps, of ttft, itl and latency, like ttft=500,itl=50 [the limits]
"""
_OUTPUT = """
    --json           print JSON, times in milliseconds
    --output FILE    write all results as JSON
    --report FILE    write an HTML page with plots
    --label NAME     name of this run in reports
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
    most_s = seconds(0, 3600)
    add_flags(
        load, _LOAD, N=whole(1, 65536), R=rate, seconds=seconds(0.1, 86400), S=most_s,
        processes=whole(1, 256), seed=whole(),
    )  # fmt: skip
    share = between(0, 1, "a number from 0 to 1")
    add_flags(
        parser.add_argument_group("requests"), _REQUESTS, mix=_mix, N=whole(), T=number,
        made_up=whole(1, 10000), size=_size, SHARE=share,
    )  # fmt: skip
    parser.set_defaults(
        request_id=None, priority="low", cache_salt=None, background=None, region=None
    )
    limits = parser.add_argument_group(
        "limits", "A stage that passes one of them is overloaded and ends the ramp."
    )
    percentile = between(0, 100, "a number above 0, at most 100", above=True)
    limit_ms = between(0, _MOST, "a number of milliseconds above 0", above=True)
    add_flags(limits, _LIMITS, MS=limit_ms, SHARE=share, percentile=percentile, slo=_slo)
    output = parser.add_argument_group("output")
    add_flags(output, _OUTPUT, tolerance=number)
    output.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="send nothing; compare files of --output with the first one, and --report them together",
    )
    add_connection_flags(parser)


def ramp_of(args: argparse.Namespace) -> Ramp:
    """Raises SettingsError."""
    closed = {
        name: getattr(args, name) for name in ("concurrency", "concurrency_step", "max_concurrency")
    }
    opened = {name: getattr(args, name) for name in ("rate", "rate_step", "max_rate")}
    is_open = args.rate is not None
    for name, value in (closed if is_open else opened).items():
        if value is not None:
            why = (
                "--rate makes an open loop; leave out one of both"
                if is_open
                else "needs --rate, the first rate"
            )
            raise SettingsError(f"--{name.replace('_', '-')}: {why}")
    first, step, most = (opened if is_open else closed).values()
    first, name = first or IN_FLIGHT, "rate" if is_open else "concurrency"
    if most is not None and most < first:
        raise SettingsError(f"--max-{name}: {most:g} is less than the first {name}, {first:g}")
    if step is not None and most is None:
        raise SettingsError(f"--{name}-step: needs --max-{name}")
    return Ramp("open" if is_open else "closed", first, step, most)


def limits_of(args: argparse.Namespace) -> Limits:
    return Limits(*_thresholds_s(args), args.error_threshold, args.percentile)


def slo_of(args: argparse.Namespace) -> Slo:
    return Slo(*(_thresholds_s(args) if args.slo is None else _in_seconds(args.slo)))


def _thresholds_s(args: argparse.Namespace) -> _Limits:
    return _in_seconds({name: getattr(args, f"{name}_threshold_ms") for name in _TIMES})


def _in_seconds(limits_ms: Mapping[str, float | None]) -> _Limits:
    found = (limits_ms.get(name) for name in _TIMES)
    latency, ttft, itl = (None if limit is None else limit / 1e3 for limit in found)
    return latency, ttft, itl


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
