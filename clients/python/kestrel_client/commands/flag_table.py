"""Adds flags that a table states as the help shows them.

A line has a flag, perhaps with other names, the name of its value, two spaces or more, and the help. Indented lines
continue the help::

    --rate, --start-rps R  requests per second in the first stage
    --object NAME...       may be given several times
    --arrivals {a,b}       takes one of these values
    --seed N               starts from this number [=0]
    --json                 takes no value

``[=0]`` at the end is the default, which the help shows as ``[0]``. ``[required]`` makes a flag required. Other words
there describe a default of None.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

from .flags import reported

_LINE = re.compile(r"(?P<flags>--[\w-]+(?:, --[\w-]+)*)(?: (?P<value>\S+))?\s{2,}(?P<help>.+)")
_DEFAULT = re.compile(r"\[=(.+)\]$")


def add_flags(group: Any, table: str, **types: Callable[[str], Any]) -> None:
    """Adds the flags of a table to a parser or a group of one.

    ``types``: the parsers of values, by the flag's name with underscores or by the name of its value. A value that has
    none is a text.
    """
    joined = re.sub(r"\n +", " ", textwrap.dedent(table).strip())
    for line in joined.split("\n"):
        found = _LINE.fullmatch(line)
        assert found is not None, f"not a line of a table of flags: {line!r}"
        flags, value = found["flags"].split(", "), found["value"]
        default = _DEFAULT.search(found["help"])
        options: dict[str, Any] = {"help": found["help"].replace("[=", "[").replace("%", "%%")}
        if value is None:
            group.add_argument(*flags, action="store_true", **options)
            continue
        name = value if value.endswith(",...") else value.removesuffix("...")
        if name.startswith("{"):
            options["choices"] = name[1:-1].split(",")
        else:
            dest = flags[0].removeprefix("--").replace("-", "_")
            options |= {"metavar": name, "type": _type(types.get(dest, types.get(name, str)))}
        if found["help"].endswith("[required]"):
            options["required"] = True
        if name != value:
            options["action"] = "append"
        group.add_argument(*flags, default=default and default[1], **options)


def _type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    return parse if parse is str else reported(parse)
