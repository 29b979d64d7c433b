"""The whole command line: the commands, their errors, and the exit status.

Exit status: 0 for success, 1 for a failure, 2 for wrong usage or configuration, 130 for an interrupt. An error is one
line on standard error.

The command line uses argparse, because flags, variables, the configuration file, --print-config and the docs' table of
flags are made from argparse actions. Another library, such as click, would need all of that again.
"""

from __future__ import annotations

import argparse
import codecs
import errno
import importlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol, cast

from .. import __version__
from ..settings.flags import EXIT_USAGE, PROGRAM, Parser, SettingsError
from .terminal import styled

_INVALID_COMMAND = re.compile(r"argument COMMAND: invalid choice: '(.*?)'")
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (-\S+)")
_INVALID_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")
EXIT_FAILED = 1
_ESCAPE = "kestrel-escape"
EXIT_INTERRUPTED = 130

COMMANDS = {
    "serve": ("serve", "serve a model over gRPC"),
    "cluster": (
        "cluster.command",
        "serve on the nodes of a Ray cluster: start, upgrade, list, end",
    ),
    "query": ("requests.skills", "ask a question, about an image or without one"),
    "caption": ("requests.skills", "describe an image"),
    "point": ("requests.skills", "find the centres of objects"),
    "detect": ("requests.skills", "find the bounding boxes of objects"),
    "segment": ("requests.skills", "outline an object"),
    "analyze": ("requests.analyze", "run several tasks on an image in one call"),
    "batch": ("batch.command", "run tasks on many images; an interrupted run can be continued"),
    "eval": ("evaluation.command", "measure a model on a data set, or compare two such runs"),
    "embed": ("requests.embed", "compute embeddings of images, for search and comparison"),
    "watch": ("requests.watch", "run tasks on the frames of a folder or of a camera's stream"),
    "run": ("requests.run_skill", "run any skill of the server by its name"),
    "put": ("requests.images", "store an image on the server and print its id, for later commands"),
    "forget": ("requests.images", "delete a stored image"),
    "chat": ("requests.chat", "ask questions about one image, as a conversation in the terminal"),
    "mcp": (
        "requests.mcp_server",
        "offer the skills of a server to agents (Model Context Protocol)",
    ),
    "bridge": (
        "bridge.command",
        "answer a tool that labels images, such as Label Studio, with a server's results",
    ),
    "models": ("weights.models", "list the model of a server; list or remove downloaded models"),
    "admin": (
        "operation.admin",
        "manage a running server: drain, cancel, flush, log-level, statistics, profile, capture",
    ),
    "doctor": ("operation.doctor", "check whether this machine can serve as configured"),
    "download": ("weights.download", "download a model's files before serving"),
    "compile": (
        "weights.compile_kernels",
        "compile the kernels of models ahead, on a machine without a GPU",
    ),
    "verify": ("weights.verify", "check a model's files and its answers"),
    "calibrate": ("weights.calibrate", "fit the scores of a model to labelled images"),
    "train": ("weights.train", "fit an adapter (LoRA) to labelled images"),
    "token": ("operation.token", "create a token and its line for the file of --auth-tokens"),
    "health": ("operation.health", "report whether a server is ready"),
    "bench": (
        "bench.command",
        "measure a server under load: time to first token, gaps between tokens, requests/s",
    ),
    "schedule": ("schedule", "run prompts with an engine in this process, without a server"),
    "replay": (
        "operation.replay",
        "repeat a captured request, with a server or in this process",
    ),
    "demo": ("demo", "serve the bundled model, call every method, and draw the answers"),
    "completion": ("completion", "print a script that completes commands and flags in a shell"),
}
"""The module and the line of help of each command."""

_EXAMPLES = """examples:
  kestrel-grpc serve
  kestrel-grpc serve --model moondream2 --device cuda --listen 127.0.0.1:50051 --listen unix:/run/kestrel.sock
  kestrel-grpc query photo.jpg "How many red circles are there?" --stream
  kestrel-grpc detect photo.jpg "red circle" --save boxes.png
  kestrel-grpc caption holiday/ long --save captioned/
  kestrel-grpc chat photo.jpg
  kestrel-grpc analyze photo.jpg --caption short --query "How many people?" --detect person
  kestrel-grpc schedule "How many squares?" "What is left of the star?" --image photo.jpg

'kestrel-grpc COMMAND --help' shows the help of a command."""


class CommandError(Exception):
    """The command failed. The message is one line for the user."""


class Command(Protocol):
    """The interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser, command: str) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class CommandParser(Parser):
    """A parser that suggests the closest known name for an unknown one.

    If ``essential`` is set, ``-h`` shows only those flags.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, add_help=False, **options)
        self.essential: tuple[str, ...] = ()
        self.add_argument("-h", action=_ShortHelp, help="show a short help and exit")
        self.add_argument("--help", action="help", help="show the full help and exit")

    def error(self, message: str) -> NoReturn:
        if (wrong := _INVALID_COMMAND.match(message)) is not None:
            hint = suggestion(wrong[1], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
            message = f"unknown command {wrong[1]!r}{hint}"
        elif (wrong := _UNKNOWN_FLAG.match(message)) is not None:
            flags = [flag for action in self._actions for flag in action.option_strings]
            flag = wrong[1].partition("=")[0]
            message = (
                f"unknown flag {wrong[1]}{_address_flag(flag, flags) or suggestion(flag, flags)}"
            )
        elif (wrong := _INVALID_CHOICE.match(message)) is not None:
            choices = re.findall(r"[^\s,']+", wrong[3])
            hint = suggestion(wrong[2], choices) or f"; choose from {', '.join(choices)}"
            message = f"argument {wrong[1]}: invalid choice: {wrong[2]!r}{hint}"
        super().error(message)

    def short_help(self) -> str:
        """The help with the essential flags only; the full help if ``essential`` is empty."""
        if not self.essential:
            return self.format_help()
        formatter = self._get_formatter()
        chosen = [a for a in self._actions if set(a.option_strings) & {*self.essential, "--help"}]
        formatter.add_usage(f"{self.prog} [flags]", [], [])
        formatter.add_text(self.description)
        formatter.start_section("most used flags")
        formatter.add_arguments(chosen)
        formatter.end_section()
        count = sum(bool(action.option_strings) for action in self._actions)
        formatter.add_text(f"'{self.prog} --help' shows all {count} flags.")
        return formatter.format_help()


class _ShortHelp(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, CommandParser)
        print(parser.short_help(), end="")
        parser.exit()


def _address_flag(flag: str, flags: Iterable[str]) -> str:
    """Names the flag of the address for --host or --port, which other programs have."""
    named = next((each for each in ("--listen", "--server") if each in flags), None)
    return f"; give {named} HOST:PORT" if flag in ("--host", "--port") and named else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?", or "" if no known word is similar."""
    near = get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def whole_parser(
    loaded: Iterable[str],
) -> tuple[CommandParser, dict[str, CommandParser], dict[str, Command]]:
    """The parser, the parsers of all commands, and the modules of the ``loaded`` commands.

    Only the parsers of the ``loaded`` commands have their flags.
    """
    parser = CommandParser(
        prog=PROGRAM,
        description="A typed, streaming gRPC server for Moondream vision-language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    adding = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, CommandParser] = {}
    modules: dict[str, Command] = {}
    for name, (module_name, summary) in COMMANDS.items():
        commands[name] = adding.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in loaded:
            module = cast(Command, importlib.import_module(f".{module_name}", __package__))
            module.add_arguments(commands[name], name)
            modules[name] = module
    return parser, commands, modules


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    _open_closed_streams()
    _write_all_characters()
    arguments = [_text(word) for word in (sys.argv[1:] if argv is None else argv)]
    # The command is found before parsing, so that only its module is imported.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser, commands, modules = whole_parser({chosen} if chosen in COMMANDS else ())
        args, rest = parser.parse_known_args(arguments)
        command = commands[args.command]
        if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
            command.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:  # words after flags, which argparse does not assign
            args.words = [*args.words, *rest]
        return modules[args.command].run(args)
    except SettingsError as error:
        return _fail(chosen, str(error), EXIT_USAGE)
    except CommandError as error:
        return _fail(chosen, str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe. Without this, the interpreter would report that when it exits.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        if error.errno == errno.ENOENT and (problem := temporary_folder_problem()):
            return _fail(chosen, problem, EXIT_FAILED)
        if error.errno != errno.ENOSPC:
            raise
        return _fail(chosen, f"cannot write: {error.strerror}", EXIT_FAILED)


def _open_closed_streams() -> None:
    """Opens standard streams that are closed (``2>&-``) on os.devnull. Otherwise the first sockets would get their
    numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _write_all_characters() -> None:
    """Lets the standard streams write characters that their encoding lacks as JSON does: \\u00e9."""
    codecs.register_error(_ESCAPE, _escaped)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors=_ESCAPE)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError), "the streams write"
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


def _text(word: str) -> str:
    """An argument that the locale's encoding cannot read as UTF-8, unless it is the name of a file."""
    if word.isascii() or os.path.exists(word):
        return word
    try:
        return os.fsencode(word).decode()
    except UnicodeError:
        return word


def temporary_folder_problem() -> str | None:
    """What to do if there is no folder for temporary files, which torch needs; None if there is one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return "no folder for temporary files can be written: let TMPDIR name one, or mount one at /tmp"
    return None


def _fail(command: str | None, message: str, status: int) -> int:
    print(f"{PROGRAM} {command}: {styled('error', 'red', sys.stderr)}: {message}", file=sys.stderr)
    return status
