"""Program: the command of a benchmark, which a table of its flags describes, and the report that it writes."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .report import Report


class Flag:
    """A flag. ``default`` gives its type: False is a switch, and a tuple takes several values. ``quick``: its value
    with --quick, or what makes it of the given one. ``others``: as for add_argument."""

    def __init__(
        self, name: str, default: Any, help: str = "", *, quick: Any = None, **others: Any
    ) -> None:
        self.name, self.default, self.quick = name, default, quick
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
        self.others = {"help": f"{help} [{shown}]" if shown or shown == 0 else help, **others}
        if default is False:
            self.others["action"] = "store_true"
            self.others["help"] = help
        elif isinstance(default, tuple):
            self.others = {"nargs": "+", "type": type(default[0]), **self.others}
        elif isinstance(default, (int, float)):
            self.others.setdefault("type", type(default))

    @property
    def field(self) -> str:
        return self.name.lstrip("-").replace("-", "_")

    def value(self, given: Any) -> Any:
        """The value with --quick."""
        return self.quick(given) if callable(self.quick) else self.quick


JSON = Flag("--json", None, "write tables, bars and machine to FILE", metavar="FILE")
QUICK = Flag("--quick", False, "do a hundredth of the work, as a smoke test")


class Program:
    """``python -m benchmarks.<module>``. ``others``: what flags that it does not know are for; if empty, they are
    errors."""

    def __init__(
        self, module: str, description: str | None, *flags: Flag, others: str = ""
    ) -> None:
        self.module, self._flags, self._takes_others = module, flags, bool(others)
        self.parser = argparse.ArgumentParser(
            prog=f"benchmarks.{module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            epilog=others or None,
        )
        for flag in (JSON, QUICK, *flags):
            self.parser.add_argument(flag.name, default=flag.default, **flag.others)

    def parse(self, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
        """Returns the program's own flags, and the others."""
        if self._takes_others:
            args, others = self.parser.parse_known_args(arguments)
        else:
            args, others = self.parser.parse_args(arguments), []
        for flag in self._flags:
            given = getattr(args, flag.field)
            if args.quick and flag.quick is not None:
                setattr(args, flag.field, flag.value(given))
        return args, others

    @contextmanager
    def reporting(
        self, arguments: Sequence[str] | None
    ) -> Iterator[tuple[argparse.Namespace, list[str], Report]]:
        """Gives the flags of ``arguments``, the others, and a report, which is finished at the end of the context."""
        args, others = self.parse(arguments)
        given = sys.argv[1:] if arguments is None else arguments
        command = shlex.join(["python", "-m", f"benchmarks.{self.module}", *given])
        report = Report(self.module.rpartition(".")[2], vars(args), command=command)
        yield args, others, report
        report.finish(args.json)
