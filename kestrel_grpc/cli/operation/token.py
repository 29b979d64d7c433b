"""``token``: makes a token and its line for the file of tokens. The token itself is stored nowhere."""

from __future__ import annotations

import argparse
import os
import sys

from kestrel_client.commands.files import file_errors
from kestrel_client.commands.flag_table import add_flags

from ...security.identity.principal import Scope
from ...security.identity.tokens import line_of, new_token, parse_scopes
from ...settings.flags import SettingsError

_FLAGS = """
    --scopes SCOPES  scopes of the token, separated by commas [=infer]
    --append FILE    append the line to this file of tokens, and print only the token
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Scopes: infer (use the model), high (use high priority), metrics (read statistics), admin (drain, cancel).\n"
        "A running server reads the new line within a second. To revoke a token, delete its line."
    )
    parser.add_argument(
        "name", metavar="NAME", help="name of the principal; several tokens may share a name"
    )
    add_flags(parser, _FLAGS)


def run(args: argparse.Namespace) -> int:
    token = new_token()
    try:
        granted = parse_scopes(args.scopes)
        line = line_of(args.name, [scope for scope in Scope if scope in granted], token)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if args.append is None:
        print(f"{token}\n{line}")
        print(
            "The first line is the token, which is not shown again; the second line is for --auth-tokens.",
            file=sys.stderr,
        )
        return 0
    with file_errors("write", args.append):
        # The file holds only hashes, but other users need not see names and scopes.
        handle = os.open(args.append, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    print(token)
    return 0
