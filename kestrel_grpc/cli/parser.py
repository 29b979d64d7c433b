"""The command line as a whole: which commands there are, and what becomes of their errors.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted. Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from .. import __version__
from ..settings.flags import EXIT_USAGE, PROGRAM, Parser, SettingsError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

COMMANDS = {
    "serve": ("serve", "serve a model over gRPC"),
    "query": ("skills", "ask a question, about a picture or without one"),
    "caption": ("skills", "describe a picture"),
    "point": ("skills", "find the centres of objects"),
    "detect": ("skills", "find the bounding boxes of objects"),
    "segment": ("skills", "outline an object"),
    "analyze": ("analyze", "several tasks on one picture at once"),
    "run": ("run_skill", "run any skill of the server by its name"),
    "put": ("pictures", "send a picture once, to name it by id afterwards"),
    "forget": ("pictures", "delete a picture that was put"),
    "models": ("models", "list the models of a server, and its limits"),
    "admin": (
        "admin",
        "manage a running server: drain, cancel, flush, log-level, statistics, profile, capture",
    ),
    "doctor": ("doctor", "check whether this machine can serve as configured"),
    "download": ("download", "fetch a model's files ahead"),
    "verify": ("verify", "check a model's files, and that it answers as it should"),
    "token": ("token", "make a token and its line for --auth-tokens"),
    "health": ("health", "tell whether a server is ready"),
    "schedule": ("schedule", "push prompts through an engine in this process, without a server"),
    "replay": ("replay", "do a captured request again, against a server or in this process"),
    "demo": ("demo", "serve the bundled model, call every method, paint the answers"),
}
"""Command to module and one line of help."""

_EXAMPLES = """examples:
  kestrel-grpc serve
  kestrel-grpc serve --model moondream2 --device cuda --listen 127.0.0.1:50051 --listen unix:/run/kestrel.sock
  kestrel-grpc query photo.jpg "How many red circles are there?" --stream
  kestrel-grpc detect photo.jpg "red circle" --save boxes.png
  kestrel-grpc analyze photo.jpg --caption short --query "How many people?" --detect person
  kestrel-grpc schedule "How many squares?" "What is left of the star?" --image photo.jpg

'kestrel-grpc COMMAND --help' tells more about a command."""


class CommandError(Exception):
    """The command failed; the message is for people, in one line."""


class Command(Protocol):
    """What a module of this package offers."""

    def add_arguments(self, parser: argparse.ArgumentParser, command: str) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog=PROGRAM,
        description="A typed, streaming gRPC server for Moondream vision-language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if word in COMMANDS), None)
    module: Command | None = None
    try:
        for name, (module_name, summary) in COMMANDS.items():
            subparser = subparsers.add_parser(
                name,
                help=summary,
                description=summary[0].upper() + summary[1:] + ".",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if name == chosen:
                module = cast(Command, importlib.import_module(f".{module_name}", __package__))
                module.add_arguments(subparser, name)
        args = parser.parse_args(arguments)
        assert module is not None, "argparse took a command that is none"
        return module.run(args)
    except SettingsError as error:
        return _fail(chosen, str(error), EXIT_USAGE)
    except CommandError as error:
        return _fail(chosen, str(error), EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough; the interpreter would complain once more on its way out.
        sys.stderr.close()
        return EXIT_FAILED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _fail(chosen, f"can't write: {error.strerror}", EXIT_FAILED)


def _open_closed_streams() -> None:
    """Standard streams that whoever started us had closed (``2>&-``) lead nowhere, instead of to our first sockets."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def _fail(command: str | None, message: str, status: int) -> int:
    print(f"{PROGRAM} {command}: error: {message}", file=sys.stderr)
    return status
