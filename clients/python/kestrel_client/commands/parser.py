"""A program of commands: its parser, the errors of commands, and the exit status.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, Protocol, cast

from .flags import EXIT_USAGE, Parser, SettingsError
from .terminal import styled

_INVALID_COMMAND = re.compile(r"argument COMMAND: invalid choice: '(.*?)'")
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (-\S+)")
_INVALID_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")
EXIT_FAILED = 1
_ESCAPE = "kestrel-escape"
EXIT_INTERRUPTED = 130


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
        self.commands: tuple[str, ...] = ()
        self.add_argument("-h", action=_ShortHelp, help="show a short help and exit")
        self.add_argument("--help", action="help", help="show the full help and exit")

    def error(self, message: str) -> NoReturn:
        if (wrong := _INVALID_COMMAND.match(message)) is not None:
            commands = self.commands
            hint = suggestion(wrong[1], commands) or f"; the commands are {', '.join(commands)}"
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


@dataclass(frozen=True, slots=True)
class Program:
    """A program of ``commands``: the module and the line of help of each."""

    name: str
    version: str
    description: str
    examples: str
    commands: Mapping[str, tuple[str, str]]

    def whole_parser(
        self, loaded: Iterable[str]
    ) -> tuple[CommandParser, dict[str, CommandParser], dict[str, Command]]:
        """The parser, the parsers of all commands, and the modules of the ``loaded`` commands.

        Only the parsers of the ``loaded`` commands have their flags. The parsed arguments name the ``program``.
        """
        parser = CommandParser(
            prog=self.name,
            description=self.description,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"{self.name} {self.version}")
        parser.set_defaults(program=self)
        parser.commands = tuple(self.commands)
        adding = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        commands: dict[str, CommandParser] = {}
        modules: dict[str, Command] = {}
        for name, (module_name, summary) in self.commands.items():
            commands[name] = adding.add_parser(
                name,
                help=summary,
                description=summary[0].upper() + summary[1:] + ".",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if name in loaded:
                module = cast(Command, importlib.import_module(module_name))
                module.add_arguments(commands[name], name)
                modules[name] = module
        return parser, commands, modules

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs one command. Returns the exit status."""
        _open_closed_streams()
        _write_all_characters()
        arguments = [_text(word) for word in (sys.argv[1:] if argv is None else argv)]
        # The command is found before parsing, so that only its module is imported.
        chosen = next((word for word in arguments if not word.startswith("-")), None)
        try:
            return self._run(chosen, arguments)
        except SettingsError as error:
            return self._fail(chosen, str(error), EXIT_USAGE)
        except CommandError as error:
            return self._fail(chosen, str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader of the output has closed the pipe. Without this, the interpreter would report that when it
            # exits.
            sys.stderr.close()
            return EXIT_FAILED
        except OSError as error:
            if error.errno == errno.ENOENT and (problem := temporary_folder_problem()):
                return self._fail(chosen, problem, EXIT_FAILED)
            if error.errno != errno.ENOSPC:
                raise
            return self._fail(chosen, f"cannot write: {error.strerror}", EXIT_FAILED)

    def _run(self, chosen: str | None, arguments: list[str]) -> int:
        parser, commands, modules = self.whole_parser([chosen] if chosen is not None else ())
        args, rest = parser.parse_known_args(arguments)
        command = commands[args.command]
        if rest and (not hasattr(args, "words") or any(word.startswith("-") for word in rest)):
            command.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:  # words after flags, which argparse does not assign
            args.words = [*args.words, *rest]
        return modules[args.command].run(args)

    def _fail(self, command: str | None, message: str, status: int) -> int:
        label = styled("error", "red", sys.stderr)
        print(f"{self.name} {command}: {label}: {message}", file=sys.stderr)
        return status


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
