"""Flags: a group of flags. Each flag has an environment variable, and maybe a key in the server's configuration file.

A flag overrides the variable, the variable overrides the file, and the file overrides the default. An invalid value
gives an error of one line that names the source of the value.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, NoReturn, cast

from .sources import UNSET, FlagSetting, Sources, variable_of
from .sources import SettingsError as SettingsError

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where a server listens, and where commands look for one."""
EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Reports an error in one line and exits with EXIT_USAGE. After parsing, fills in the settings that Flags added."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sources = Sources()
        self.groups: dict[str, Flags] = {}
        """The groups that ``add_settings`` made, by title."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Overrides argparse's method, which argparse calls for a subcommand's parser too. Raises SettingsError."""
        words = sys.argv[1:] if args is None else list(args)
        parsed, rest = super().parse_known_args(self._with_bare_flags(words), namespace)
        if self.sources.settings:
            self.sources.settle(parsed)
        return cast(argparse.Namespace, parsed), rest

    def _with_bare_flags(self, words: list[str]) -> list[str]:
        """The words, with ``--tls=on`` for a bare ``--tls``: argparse would take any next word for its value."""
        flags: dict[str, Any] = {
            flag: action
            for action in self._actions
            if action.nargs == "?" and action.choices is not None
            for flag in action.option_strings
        }
        end = words.index("--") if "--" in words else len(words)
        return [
            f"{word}={flags[word].const}"
            if word in flags and at < end and following not in flags[word].choices
            else word
            for at, (word, following) in enumerate(zip_longest(words, words[1:]))
        ]


class _Collect(argparse.Action):
    """Joins the lists of a repeated flag. The first list replaces the default."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        kept = [] if before is self.default else before
        setattr(namespace, self.dest, [*kept, *values])


class Flags:
    """A group of flags whose defaults come from variables and, if it has a ``section``, from the configuration file."""

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        title: str,
        *,
        section: str | None = None,
        environ: Mapping[str, str] | None = None,
        description: str | None = None,
        again: bool = False,
    ) -> None:
        """``parser`` must be a Parser. ``again``: it is that of an action of a command with the same flags. The command
        fills in flags that are not given."""
        assert isinstance(parser, Parser), "only a Parser fills in flags that are not given"
        if section is not None and description is None:
            description = f"in a configuration file: [{section}]"
        self._group = parser.add_argument_group(title, description)
        self._settings = [] if again else parser.sources.settings
        self._absent = argparse.SUPPRESS if again else UNSET
        self._section = section
        self._environ = os.environ if environ is None else environ
        parser.sources.environ = self._environ

    def add(
        self,
        flag: str,
        *,
        help: str,
        default: Any = None,
        type: Callable[[str], Any] = str,
        shown: str | None = None,
        repeated: bool = False,
        **options: Any,
    ) -> None:
        """Adds one flag.

        Args:
            shown: The default as the help shows it; None shows ``default`` itself.
            repeated: ``type`` returns lists, and the flag may be given several times.
        """
        shown = shown if shown is not None else f"{default}"
        if repeated:
            options["action"] = _Collect
        action = self._group.add_argument(
            flag,
            default=self._absent,
            type=reported(type),
            help=f"{help} [{shown}; {variable_of(flag)}]".replace("%", "%%"),
            **options,
        )
        self._settings.append(
            FlagSetting(
                flag=flag,
                dest=action.dest,
                section=self._section,
                parse=type,
                default=default,
                shown=shown,
                environ=self._environ,
                choices=options.get("choices"),
                repeated=repeated,
            )
        )


def reported(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """``type`` with its ValueError raised as ArgumentTypeError, because argparse prints only that error's message."""

    def parse(text: str) -> Any:
        try:
            return type(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse
