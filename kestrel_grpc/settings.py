"""Flags and environment: the only reader of either. From them come a frozen ServerConfig and a RuntimeConfig.

Every flag ``--some-thing`` added through Flags has an environment variable KESTREL_SOME_THING: the flag wins over the
variable, the variable over the default. What is invalid is said in one line that names the flag or the variable.

Imports the engine only when an engine's configuration is asked for: a client's command line starts without it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from .addresses import parse_address
from .log_settings import add_log_flags
from .security.config import SecurityConfig
from .telemetry.config import TelemetryConfig, telemetry_config

if TYPE_CHECKING:
    from kestrel_engine import RuntimeConfig

PROGRAM = "kestrel-grpc"
DEFAULT_BATCH_SIZE = 16
"""A server has several callers: sixteen decode six times as fast together as one after the other."""

DEFAULT_ADDRESS = "127.0.0.1:50051"
EXIT_USAGE = 2

MIB = 1024 * 1024
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(i?)B?|B)?", re.IGNORECASE)
_PLUGIN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_LARGEST_MESSAGE = 2**31 - 1
"""grpc counts a message's bytes in 32 bits."""


class SettingsError(Exception):
    """A flag or variable is invalid; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What the server itself needs to know; the engine's part is RuntimeConfig."""

    listen: tuple[str, ...] = (DEFAULT_ADDRESS,)
    """Addresses, TCP and unix. Loopback by default: beyond it, ``security`` must be set up."""
    security: SecurityConfig = field(default_factory=SecurityConfig)
    max_message_bytes: int = 64 * MIB
    """Of one message, either way: the largest picture allowed (32 MiB) and raw pixels of a 20 megapixel one."""
    image_store_bytes: int = 256 * MIB
    """Pictures kept for requests that name them by id; 0 keeps none."""
    skills: tuple[str, ...] = ()
    """Plug-in skills to serve besides the five, as ``package.module:SkillClass``."""
    grace_s: float = 30.0
    """How long running requests may go on once the server is told to stop. Kubernetes' own default."""
    access_log: Literal["off", "text", "json"] = "off"
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"
    """As log_settings.log_levels reads it."""
    orca: bool = False
    """Whether the trailers of VisionService's calls say how busy the server is."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """What is measured, and where that goes. By default nothing."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with EXIT_USAGE."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class _Collect(argparse.Action):
    """Gathers the lists that a repeated flag gives; the first of them replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        kept = [] if before is self.default else before
        setattr(namespace, self.dest, [*kept, *values])


class Flags:
    """Adds flags whose defaults come from the environment."""

    def __init__(
        self, parser: argparse._ActionsContainer, environ: Mapping[str, str] | None = None
    ) -> None:
        self._parser = parser
        self._environ = os.environ if environ is None else environ

    def add(
        self,
        flag: str,
        *,
        help: str,
        default: Any = None,
        type: Callable[[str], Any] = str,
        shown: str | None = None,
        **options: Any,
    ) -> None:
        """``shown``: the default as the help shows it, if not by itself. Raises SettingsError for a bad variable."""
        variable = "KESTREL_" + flag.removeprefix("--").upper().replace("-", "_")
        value = self._environ.get(variable)
        if value is not None and value != "":
            try:
                parsed = type(value)
            except (ValueError, argparse.ArgumentTypeError) as error:
                raise SettingsError(f"{variable}={value!r}: {error}") from None
            choices = options.get("choices")
            if choices is not None and parsed not in choices:
                raise SettingsError(f"{variable}={value!r}: must be one of {', '.join(choices)}")
        shown = shown if shown is not None else f"{default}"
        self._parser.add_argument(
            flag,
            default=default if not value else parsed,
            type=_told(type),
            help=f"{help} [{shown}; {variable}]",
            **options,
        )


def add_server_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    flags = Flags(parser.add_argument_group("server"), environ)
    flags.add(
        "--listen",
        type=_addresses,
        action=_Collect,
        metavar="ADDRESS",
        shown=DEFAULT_ADDRESS,
        help="where to listen: HOST:PORT, [IPV6]:PORT or unix:PATH; may be given several times, or several with commas",
    )
    flags.add(
        "--max-message-bytes",
        type=size,
        metavar="SIZE",
        default=_default(ServerConfig, "max_message_bytes"),
        shown="64MiB",
        help="largest message, either way",
    )
    flags.add(
        "--image-store-bytes",
        type=size,
        metavar="SIZE",
        default=_default(ServerConfig, "image_store_bytes"),
        shown="256MiB",
        help="pictures kept for requests that name them by id, unused ones dropped first; 0 keeps none",
    )
    flags.add(
        "--skill",
        type=_plugins,
        action=_Collect,
        metavar="MODULE:CLASS",
        shown="none",
        help="a skill to serve besides the model's own (RunSkill); may be given several times, or several with commas",
    )
    flags.add(
        "--grace",
        type=_seconds,
        metavar="SECONDS",
        default=_default(ServerConfig, "grace_s"),
        help="how long running requests may go on after SIGTERM or Ctrl-C; a second signal ends them",
    )
    flags.add(
        "--metrics-listen",
        type=parse_address,
        metavar="ADDRESS",
        shown="off",
        help="where Prometheus finds metrics: HOST:PORT; needs kestrel-grpc[telemetry]",
    )
    flags.add(
        "--orca",
        choices=("on", "off"),
        default="off",
        help="load reports in trailers, for balancers",
    )
    add_log_flags(flags)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Raises SettingsError."""
    listen = tuple(dict.fromkeys(args.listen or ()))
    if not 1 <= args.max_message_bytes <= _LARGEST_MESSAGE:
        raise SettingsError(
            f"--max-message-bytes={args.max_message_bytes}: must be 1 to {_LARGEST_MESSAGE}"
        )
    try:
        telemetry = telemetry_config(os.environ, args.metrics_listen)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return ServerConfig(
        listen=listen or (DEFAULT_ADDRESS,),
        max_message_bytes=args.max_message_bytes,
        image_store_bytes=args.image_store_bytes,
        skills=tuple(dict.fromkeys(args.skill or ())),
        grace_s=args.grace,
        access_log=args.access_log,
        log_format=args.log_format,
        log_level=args.log_level,
        orca=args.orca == "on",
        telemetry=telemetry,
    )


def add_model_flags(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] | None = None
) -> None:
    from kestrel_engine import ImageLimits, RuntimeConfig

    model = Flags(parser.add_argument_group("model"), environ)
    model.add(
        "--model",
        default=_default(RuntimeConfig, "model"),
        help="kestrel-tiny, moondream2, moondream3-preview, moondream3.1-9b-a2b, "
        "a hub id ORG/REPO[@REVISION][:FILE], or a path",
    )
    model.add(
        "--weights",
        metavar="PATH",
        shown="the model's own",
        help="a checkpoint folder, or one .safetensors or .pt file",
    )
    model.add(
        "--tokenizer",
        metavar="PATH",
        shown="beside the weights, else the model's own",
        help="tokenizer.json",
    )
    model.add(
        "--device",
        default=_default(RuntimeConfig, "device"),
        help="auto (CUDA if there is one), cpu, cuda or cuda:N",
    )
    model.add(
        "--dtype",
        default=_default(RuntimeConfig, "dtype"),
        help="float32, bfloat16, float16, or auto (float32 on a CPU, bfloat16 on CUDA)",
    )
    model.add(
        "--threads",
        type=whole,
        metavar="N",
        shown="torch's choice",
        help="threads of one operator on a CPU",
    )
    model.add(
        "--seed",
        type=whole,
        metavar="N",
        shown="drawn anew",
        help="makes the seeds of requests that name none repeatable",
    )
    limits = Flags(parser.add_argument_group("limits and defaults of requests"), environ)
    limits.add(
        "--max-batch-size",
        type=whole,
        metavar="N",
        default=DEFAULT_BATCH_SIZE,
        help="most requests that are computed together",
    )
    limits.add(
        "--max-seq-length",
        type=whole,
        metavar="N",
        shown="the model's context",
        help="most positions of one request, picture, prompt and answer together",
    )
    limits.add(
        "--max-queue",
        type=whole,
        metavar="N",
        default=_default(RuntimeConfig, "max_queue"),
        help="most requests that wait; more get RESOURCE_EXHAUSTED",
    )
    limits.add(
        "--max-queued-pixels",
        type=whole,
        metavar="N",
        default=_default(RuntimeConfig, "max_queued_pixels"),
        help="pixels of pictures that may wait to be decoded",
    )
    limits.add(
        "--max-queue-wait",
        type=_seconds,
        metavar="SECONDS",
        default=_default(RuntimeConfig, "max_queue_wait_s"),
        shown="as long as the caller waits",
        help="how long a request may wait before it gets RESOURCE_EXHAUSTED",
    )
    limits.add(
        "--max-new-tokens",
        type=whole,
        metavar="N",
        shown="what the context has room for",
        help="most tokens that one request may ask for",
    )
    limits.add(
        "--default-max-new-tokens",
        type=whole,
        metavar="N",
        default=_default(RuntimeConfig, "default_max_tokens"),
        help="most tokens generated when a request names no max_tokens",
    )
    limits.add(
        "--max-image-bytes",
        type=size,
        metavar="SIZE",
        default=_default(ImageLimits, "max_bytes"),
        shown="32MiB",
        help="largest encoded picture",
    )
    limits.add(
        "--max-image-pixels",
        type=whole,
        metavar="N",
        default=_default(ImageLimits, "max_pixels"),
        help="most pixels of a picture, width times height",
    )
    limits.add(
        "--max-image-aspect-ratio",
        type=float,
        metavar="RATIO",
        default=_default(ImageLimits, "max_aspect_ratio"),
        help="longest side of a picture over its shortest",
    )
    _add_schedule_flags(parser, environ)


def _add_schedule_flags(parser: argparse.ArgumentParser, environ: Mapping[str, str] | None) -> None:
    from kestrel_engine import RuntimeConfig

    work = Flags(parser.add_argument_group("caches and steps"), environ)
    work.add(
        "--kv-cache-pages",
        type=whole,
        metavar="N",
        shown="max-batch-size full requests, as far as memory allows",
        help="pages of the KV cache",
    )
    work.add(
        "--prefix-cache",
        choices=("on", "off"),
        default="on",
        help="reuse what was computed for prompts and pictures seen before",
    )
    work.add(
        "--image-cache-bytes",
        type=size,
        metavar="SIZE",
        default=_default(RuntimeConfig, "image_cache_bytes"),
        shown="256MiB",
        help="decoded pictures kept in memory for repeats; 0 keeps none",
    )
    work.add(
        "--step-prefill-positions",
        type=whole,
        metavar="N",
        default=_default(RuntimeConfig, "step_prefill_positions"),
        help="prompt positions a step takes on beside those who decode: less is smoother, more starts sooner",
    )
    work.add(
        "--step-crops",
        type=whole,
        metavar="N",
        default=_default(RuntimeConfig, "step_crops"),
        help="crops of pictures a step encodes beside those who decode",
    )
    work.add(
        "--step-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=_default(RuntimeConfig, "step_timeout_s"),
        help="without the end of a step for so long the engine counts as hung",
    )


_FLAG_OF_FIELD = {
    "model_path": "--weights",
    "tokenizer_path": "--tokenizer",
    "cpu_threads": "--threads",
    "default_max_tokens": "--default-max-new-tokens",
    "max_queue_wait_s": "--max-queue-wait",
    "step_timeout_s": "--step-timeout",
    "image_limits.max_bytes": "--max-image-bytes",
    "image_limits.max_pixels": "--max-image-pixels",
    "image_limits.max_aspect_ratio": "--max-image-aspect-ratio",
}
"""Where a field of RuntimeConfig and its flag have different names."""


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """Raises SettingsError naming the flag at fault."""
    from kestrel_engine import ConfigError, ImageLimits, RuntimeConfig

    try:
        return RuntimeConfig(
            model=args.model,
            model_path=args.weights,
            tokenizer_path=args.tokenizer,
            device=args.device,
            dtype=args.dtype,
            max_batch_size=args.max_batch_size,
            max_seq_length=args.max_seq_length,
            max_queue=args.max_queue,
            max_queued_pixels=args.max_queued_pixels,
            max_queue_wait_s=args.max_queue_wait,
            kv_cache_pages=args.kv_cache_pages,
            max_new_tokens=args.max_new_tokens,
            default_max_tokens=args.default_max_new_tokens,
            prefix_cache=args.prefix_cache == "on",
            image_cache_bytes=args.image_cache_bytes,
            step_prefill_positions=args.step_prefill_positions,
            step_crops=args.step_crops,
            step_timeout_s=args.step_timeout,
            cpu_threads=args.threads,
            seed=args.seed,
            image_limits=ImageLimits(
                max_bytes=args.max_image_bytes,
                max_pixels=args.max_image_pixels,
                max_aspect_ratio=args.max_image_aspect_ratio,
            ),
        )
    except ConfigError as error:
        raise SettingsError(config_error_line(error.field, error.value, error.limit)) from None


def config_error_line(field: str, value: object, limit: str) -> str:
    """A ConfigError in terms of flags."""
    flag = _FLAG_OF_FIELD.get(field, "--" + field.replace("_", "-"))
    return f"{flag}={value}: {limit}"


def size(text: str) -> int:
    """Bytes: a number, or one with K, M, G (thousands) or KiB, MiB, GiB (1024s). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a number of bytes, like 1000000, 64MiB or 2G")
    power: int = " KMG".index(match[2].upper()) if match[2] else 0
    unit: int = (1024 if match[3] else 1000) ** power
    return int(match[1]) * unit


def whole(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _seconds(text: str) -> float:
    value = float(text) if re.fullmatch(r"\d+(\.\d*)?", text.strip()) else -1.0
    if not 0 <= value <= 86_400:
        raise ValueError("must be a number of seconds from 0 to 86400")
    return value


def _addresses(text: str) -> list[str]:
    return [parse_address(part.strip()) for part in text.split(",")]


def _plugins(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not all(_PLUGIN.fullmatch(name) for name in names):
        raise ValueError("must be PACKAGE.MODULE:CLASS")
    return names


def _told(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse hides a ValueError's words, not an ArgumentTypeError's."""

    def parse(text: str) -> Any:
        try:
            return type(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def _default(config: Any, field: str) -> Any:
    return config.__dataclass_fields__[field].default
