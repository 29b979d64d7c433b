"""A program of commands: its parser, the errors of commands, and the exit status.

Exit status: 0 for success, 1 for a failure, 2 for wrong usage or configuration, 130 for an interrupt. An error is one
line on standard error.

The command line uses argparse, because flags, variables, the configuration file, --print-config and the docs' table of
flags are made from argparse actions. Another library, such as click, would need all of that again.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import importlib
import io
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn, Protocol, cast

from .flags import EXIT_USAGE, Parser, SettingsError
from .terminal import styled

_INVALID_COMMAND = re.compile(r"argument COMMAND: invalid choice: '(.*?)'")
_UNKNOWN_FLAG = re.compile(r"unrecognized arguments: (-\S+)")
_INVALID_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)")
_DEFAULT = re.compile(r"(.*?)(?: \[([^\[\]]*)\])?")
EXIT_FAILED = 1
_ESCAPE = "kestrel-escape"
EXIT_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CommandError(Exception):
    """The command failed. The message is one line for the user."""


GROUPS = ("ask", "serve", "operate", "teach", "measure")
"""The groups of commands, in the order of the help."""


class Command(Protocol):
    """The interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser, command: str) -> None: ...
    def run(self, args: argparse.Namespace) -> int: ...


class CommandParser(Parser):
    """A parser that suggests the closest known name for an unknown one.

    ``-h`` shows the first clause of each flag's help; only of the ``essential`` flags, if there are any.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, add_help=False, **options)
        self.essential: tuple[str, ...] = ()
        self.removed: Mapping[str, str] = {}
        """What to give in place of flags that were removed."""
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
            hint = self.removed.get(flag) or _address_flag(flag, flags) or suggestion(flag, flags)
            if os.path.exists(wrong[1]):
                hint = f"; a file of that name is ./{wrong[1]}"
            message = f"unknown flag {wrong[1]}{hint}"
        elif (wrong := _INVALID_CHOICE.match(message)) is not None:
            choices = re.findall(r"[^\s,']+", wrong[3])
            hint = f"; choose from {', '.join(choices)}{suggestion(wrong[2], choices)}"
            message = f"argument {wrong[1]}: invalid choice: {wrong[2]!r}{hint}"
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse, which ignores that standard output cannot be written."""
        if message and file is sys.stdout:
            file.write(message)
        else:
            super()._print_message(message, file)

    def short_help(self) -> str:
        """The help of ``-h``."""
        formatter = self._get_formatter()
        formatter.add_usage(self.short_usage(), [], [])
        formatter.add_text(self.description)
        flags = [a for a in self._actions if a.option_strings and a.help != argparse.SUPPRESS]
        shown = {*self.essential, "--help"}
        chosen = [a for a in flags if not self.essential or shown & {*a.option_strings}]
        for title, actions in (
            ("positional arguments", [a for a in self._actions if not a.option_strings]),
            ("most used flags" if len(chosen) < len(flags) else "flags", chosen),
        ):
            formatter.start_section(title)
            formatter.add_arguments(map(_brief, actions))
            formatter.end_section()
        formatter.add_text(self.epilog)
        formatter.add_text(f"'{self.prog} --help' says more, about all {len(flags)} flags.")
        return formatter.format_help()

    def short_usage(self) -> str:
        """The usage: words and required flags."""
        if self.usage is not None:
            return self.usage
        words = [self.prog]
        for action in self._actions:
            value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
            if action.option_strings and action.required:
                words.append(f"{action.option_strings[0]} {value}")
            elif not action.option_strings:
                words.append(f"[{value} ...]" if action.nargs == "*" else str(value))
        return " ".join([*words, "[flags]"])


def _brief(action: argparse.Action) -> argparse.Action:
    """The action with the first clause of its help, and with its default."""
    text, default = _DEFAULT.fullmatch(action.help or "").groups()  # type: ignore[union-attr]
    default = (default or "").partition("; KESTREL_")[0].removeprefix("KESTREL_")
    brief = copy(action)
    brief.help = text.partition("; ")[0] + (f" [{default}]" if default else "")
    return brief


class _MainParser(CommandParser):
    """The parser of a program. Its help lists the commands by group."""

    def __init__(self, program: Program) -> None:
        super().__init__(prog=program.name, description=program.description)
        self.program = program

    def format_help(self) -> str:
        return f"{self.short_help()}\n{self.program.examples}\n"

    def short_help(self) -> str:
        lines = [f"usage: {self.prog} COMMAND ...", "", self.program.description]
        width = max(map(len, self.commands)) + 2
        groups = dict.fromkeys(each.group for each in self.program.commands.values())
        for group in sorted(groups, key=GROUPS.index):
            lines += ["", f"{group}:"]
            for name, each in self.program.commands.items():
                if each.group == group:
                    lines += textwrap.wrap(
                        f"{name:{width}}{each.summary}",
                        100,
                        initial_indent="  ",
                        subsequent_indent=" " * (width + 2),
                    )
        lines += [
            "",
            f"'{self.prog} COMMAND -h' shows a command's most used flags, --help all of them.",
        ]
        return "\n".join(lines) + "\n"


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
    """ "; did you mean …?", or "" if no known word is similar. The dashes that all flags have count for nothing."""
    names = {each.lstrip("-"): each for each in known}
    near = get_close_matches(word.lstrip("-"), names, 1)
    return f"; did you mean {names[near[0]]}?" if near else ""


class CommandEntry(NamedTuple):
    """A command in a program's table. ``module`` is a Command; its ESSENTIAL, if any, are its most used flags, and
    REMOVED what to give in place of removed ones."""

    module: str
    group: str
    summary: str


def entries(package: str, table: str) -> dict[str, CommandEntry]:
    """The commands of a table. A line has a group, or the name of one of its commands, the command's module in
    ``package``, and the summary."""
    found: dict[str, CommandEntry] = {}
    group = ""
    for line in table.strip().splitlines():
        name, *rest = line.split(maxsplit=2)
        if rest:
            module, summary = rest
            found[name] = CommandEntry(f"{package}.{module}", group, summary)
        else:
            group = name
    return found


@dataclass(frozen=True, slots=True)
class Program:
    """A program of ``commands``."""

    name: str
    version: str
    description: str
    examples: str
    commands: Mapping[str, CommandEntry]

    def whole_parser(
        self, loaded: Iterable[str]
    ) -> tuple[CommandParser, dict[str, CommandParser], dict[str, Command]]:
        """The parser, the parsers of all commands, and the modules of the ``loaded`` commands.

        Only the parsers of the ``loaded`` commands have their flags. The parsed arguments name the ``program``.
        """
        parser = _MainParser(self)
        parser.add_argument("--version", action="version", version=f"{self.name} {self.version}")
        parser.set_defaults(program=self)
        parser.commands = tuple(self.commands)
        adding = parser.add_subparsers(
            dest="command", metavar="COMMAND", required=True, parser_class=CommandParser
        )
        commands: dict[str, CommandParser] = {}
        modules: dict[str, Command] = {}
        for name, (module_name, _, summary) in self.commands.items():
            commands[name] = adding.add_parser(
                name,
                help=summary,
                description=summary[0].upper() + summary[1:] + ".",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            if name in loaded:
                module = cast(Command, importlib.import_module(module_name))
                module.add_arguments(commands[name], name)
                commands[name].essential = getattr(module, "ESSENTIAL", ())
                commands[name].removed = getattr(module, "REMOVED", {})
                commands[name].usage = commands[name].short_usage()
                modules[name] = module
        return parser, commands, modules

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Runs one command. Returns the exit status."""
        had_output = _open_closed_streams()
        _write_all_characters()
        arguments = [_text(word) for word in (sys.argv[1:] if argv is None else argv)]
        # The command is found before parsing, so that only its module is imported.
        chosen = next((word for word in arguments if not word.startswith("-")), None)
        try:
            try:
                return self._run(chosen, arguments)
            finally:
                sys.stdout.flush()  # What fails here fails at the exit otherwise, with another status.
        except SettingsError as error:
            return self._fail(chosen, str(error), EXIT_USAGE)
        except CommandError as error:
            return self._fail(chosen, str(error), EXIT_FAILED)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            # The reader of the output has closed the pipe.
            _drop_output()
            sys.stderr.close()
            return EXIT_FAILED
        except OSError as error:
            if error.errno == errno.ENOENT and (problem := temporary_folder_problem()):
                return self._fail(chosen, problem, EXIT_FAILED)
            if error.errno not in (*_FULL, *(() if had_output else (errno.EBADF,))):
                raise
            _drop_output()
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
        name = self.name if command is None else f"{self.name} {command}"
        print(f"{name}: {label}: {message}", file=sys.stderr)
        return status


def _open_closed_streams() -> bool:
    """Opens standard streams that are closed (``2>&-``) on os.devnull. Otherwise the first sockets would get their
    numbers. Returns whether there is a standard output; if not, each write to it fails."""
    had_output = sys.stdout is not None
    if sys.stdin is None:
        sys.stdin = open(os.devnull)
    if not had_output:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")
    return had_output


def _drop_output() -> None:
    """Leads standard output elsewhere. The interpreter writes at its exit what the stream still holds."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


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
