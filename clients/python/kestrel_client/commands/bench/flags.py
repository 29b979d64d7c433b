"""The flags of ``bench``, and the plan that they state."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from ..connection import add_connection_flags
from ..flags import SettingsError, reported
from ..requests.inputs import IMAGE_HELP
from ..values import number, seconds, whole
from .sending.mix import SKILLS
from .stages import Limits, Ramp, Slo

IN_FLIGHT = 8
"""The default of --concurrency."""
_MOST_IN_FLIGHT = 65536
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


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=f"{IMAGE_HELP} [a sample image]")
    _add_load_flags(parser)
    _add_request_flags(parser)
    _add_limit_flags(parser)
    _add_output_flags(parser)
    add_connection_flags(parser)


def _add_load_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group(
        "load",
        "A closed loop keeps requests in flight. An open loop (--rate) sends them at random times, as independent "
        "callers do, and measures each from the time when it was due.",
    )
    level = whole(1, _MOST_IN_FLIGHT)
    load.add_argument(
        "--concurrency",
        "--start-concurrency",
        type=level,
        metavar="N",
        help=f"closed loop: requests in flight in the first stage, 1 to {_MOST_IN_FLIGHT} [{IN_FLIGHT}]",
    )
    load.add_argument(
        "--max-concurrency",
        type=level,
        metavar="N",
        help="closed loop: raise the requests in flight to this, until a limit is passed [one stage]",
    )
    load.add_argument(
        "--concurrency-step",
        type=level,
        metavar="N",
        help="closed loop: requests in flight that each stage adds [each stage has twice as many]",
    )
    rate = _above_zero("requests per second")
    load.add_argument(
        "--rate",
        "--start-rps",
        type=rate,
        metavar="R",
        help="open loop: requests per second in the first stage",
    )
    load.add_argument(
        "--max-rate",
        "--max-rps",
        type=rate,
        metavar="R",
        help="open loop: raise the rate to this, until a limit is passed [one stage]",
    )
    load.add_argument(
        "--rate-step",
        "--rps-step",
        type=rate,
        metavar="R",
        help="open loop: requests per second that each stage adds [each stage has twice as many]",
    )
    load.add_argument(
        "--arrivals",
        choices=("poisson", "steady"),
        default="poisson",
        help="open loop: random gaps, or equal ones [%(default)s]",
    )
    load.add_argument(
        "--max-in-flight",
        type=level,
        default=1024,
        metavar="N",
        help="open loop: requests above this are not sent and count as failed [%(default)s]",
    )
    load.add_argument(
        "--seconds",
        "--stage-duration",
        type=seconds(0.1, 86400),
        default=10.0,
        metavar="S",
        help="how long each stage is measured, 0.1 to 86400 [%(default)s]",
    )
    load.add_argument(
        "--warm-up",
        type=seconds(0, 3600),
        metavar="S",
        help="load before each stage that is not measured [a tenth of --seconds]",
    )
    load.add_argument(
        "--drain",
        type=seconds(0, 3600),
        default=30.0,
        metavar="S",
        help="how long unfinished requests may take after a stage; then they count as failed [%(default)s]",
    )
    load.add_argument(
        "--processes",
        type=whole(1, 256),
        default=1,
        metavar="N",
        help="client processes that share the load [%(default)s]",
    )
    load.add_argument(
        "--seed",
        type=whole(),
        default=0,
        help="seed of arrivals, skills, questions and made-up images [%(default)s]",
    )


def _add_request_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--mix",
        type=reported(_mix),
        default={"query": 1.0},
        metavar="SKILL=SHARE,...",
        help=f"how often each skill is asked; skills are {', '.join(SKILLS)} [query]",
    )
    group.add_argument(
        "--question",
        action="append",
        help="question about each image; of several, one at random [What is in this image?]",
    )
    group.add_argument(
        "--object",
        action="append",
        metavar="NAME",
        help="object for point, detect and segment; of several, one at random [red circle]",
    )
    group.add_argument(
        "--max-tokens",
        type=whole(),
        default=32,
        help="limit on the tokens of an answer [%(default)s]",
    )
    group.add_argument("--temperature", type=number, help="of sampling [the server's]")
    group.add_argument(
        "--unary",
        action="store_true",
        help="ask for whole answers instead of streams: no TTFT and ITL",
    )
    group.add_argument(
        "--made-up",
        type=whole(1, 10000),
        metavar="N",
        help="use this many made-up images",
    )
    group.add_argument(
        "--size",
        type=reported(_size),
        default=(640, 480),
        metavar="WxH",
        help="size of made-up images [640x480]",
    )
    group.add_argument(
        "--unique-images",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="share of requests, 0 to 1, whose image is new to the server: one of the images with a faint pattern "
        "[%(default)s]",
    )
    parser.set_defaults(
        request_id=None, priority="low", cache_salt=None, background=None, region=None
    )
    group.add_argument(
        "--model", help="name of the model that must answer [the server's default model]"
    )
    group.add_argument("--adapter", metavar="NAME", help="adapter to apply [none]")


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group(
        "limits", "A stage that passes one of them is overloaded and ends the ramp."
    )
    for name, default, what in (
        ("latency", 4000.0, "of the time of a whole answer"),
        ("ttft", 2500.0, "of the time to the first token"),
        ("itl", None, "of the time between tokens"),
    ):
        limits.add_argument(
            f"--{name}-threshold-ms",
            type=_above_zero("milliseconds"),
            default=default,
            metavar="MS",
            help=f"limit {what}, in milliseconds [{'none' if default is None else f'{default:g}'}]",
        )
    limits.add_argument(
        "--error-threshold",
        type=_share,
        default=0.1,
        metavar="SHARE",
        help="limit of the share of requests that fail, 0 to 1 [%(default)s]",
    )
    limits.add_argument(
        "--percentile",
        type=reported(_percentile),
        default=95.0,
        metavar="P",
        help="the percentile of times that the limits mean [95]",
    )
    limits.add_argument(
        "--slo",
        type=reported(_slo),
        metavar="NAME=MS,...",
        help="what a good request keeps, of ttft, itl and latency, like ttft=500,itl=50 [the limits]",
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON, times in milliseconds")
    output.add_argument("--output", metavar="FILE", help="write all results as JSON")
    output.add_argument("--report", metavar="FILE", help="write an HTML page with plots")
    output.add_argument("--label", metavar="NAME", help="name of this run in reports")
    output.add_argument(
        "--compare",
        nargs="+",
        metavar="FILE",
        help="send nothing; compare files of --output with the first one, and --report them together",
    )
    output.add_argument(
        "--tolerance",
        type=number,
        default=5.0,
        metavar="PERCENT",
        help="with --compare: exit with 1 if a figure is worse by more than this [%(default)s]",
    )


def ramp_of(args: argparse.Namespace) -> Ramp:
    """Raises SettingsError."""
    is_open = args.rate is not None
    if not is_open:
        for flag in ("max_rate", "rate_step"):
            if getattr(args, flag) is not None:
                raise SettingsError(f"--{flag.replace('_', '-')}: needs --rate, the first rate")
        first, step, most, name = (
            args.concurrency or IN_FLIGHT, args.concurrency_step, args.max_concurrency, "concurrency"
        )  # fmt: skip
    else:
        for flag in ("concurrency", "max_concurrency", "concurrency_step"):
            if getattr(args, flag) is not None:
                raise SettingsError(
                    f"--{flag.replace('_', '-')}: --rate makes an open loop; leave out one of both"
                )
        first, step, most, name = args.rate, args.rate_step, args.max_rate, "rate"
    if most is not None and most < first:
        raise SettingsError(f"--max-{name}: {most:g} is less than the first {name}, {first:g}")
    if step is not None and most is None:
        raise SettingsError(f"--{name}-step: needs --max-{name}")
    return Ramp("open" if is_open else "closed", first, step, most)


def limits_of(args: argparse.Namespace) -> Limits:
    return Limits(
        _in_seconds(args.latency_threshold_ms),
        _in_seconds(args.ttft_threshold_ms),
        _in_seconds(args.itl_threshold_ms),
        args.error_threshold,
        args.percentile,
    )


def slo_of(args: argparse.Namespace) -> Slo:
    given = args.slo
    if given is None:
        given = {name: getattr(args, f"{name}_threshold_ms") for name in _SLO}
    return Slo(*(_in_seconds(given.get(name)) for name in _SLO))


_SLO = ("latency", "ttft", "itl")


def _in_seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _mix(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for part in text.split(","):
        skill, equals, share = part.partition("=")
        if skill not in SKILLS:
            raise ValueError(f"{skill!r} is no skill; the skills are {', '.join(SKILLS)}")
        if skill in weights:
            raise ValueError(f"{skill!r} is given twice")
        weights[skill] = _positive(share) if equals else 1.0
    return weights


def _slo(text: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in _SLO or name in limits or not equals:
            raise ValueError("must be like ttft=500,itl=50,latency=4000, in milliseconds")
        limits[name] = _positive(value)
    return limits


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    width, height = (int(side) for side in found.groups()) if found else (0, 0)
    if not (16 <= width <= 8192 and 16 <= height <= 8192):
        raise ValueError("must be a width and a height from 16 to 8192, like 640x480")
    return width, height


def _percentile(text: str) -> float:
    value = _positive(text)
    if value > 100:
        raise ValueError("must be a number above 0, at most 100")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is not a number above 0 and below 1e9")
    return value


def _above_zero(unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            return _positive(text)
        except ValueError:
            raise ValueError(f"must be a number of {unit} above 0") from None

    return reported(parse)


@reported
def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError("must be a number from 0 to 1")
    return value
