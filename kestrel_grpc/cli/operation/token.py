"""``token``: makes a token and the line of the file that knows it. The token itself is kept nowhere."""

from __future__ import annotations

import argparse
import os
import sys

from ...security.identity.principal import Scope
from ...security.identity.tokens import line_of, new_token, parse_scopes
from ...settings.flags import SettingsError
from ..parser import CommandError


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Scopes: infer (ask the model), high (with high priority), metrics (read statistics), admin (drain, cancel).\n"
        "A server that runs takes the new line within a second. To revoke a token, delete its line."
    )
    parser.add_argument(
        "name", metavar="NAME", help="whose it is; several tokens may have one name"
    )
    parser.add_argument(
        "--scopes",
        default=Scope.INFER.value,
        help="what it is good for, with commas between [infer]",
    )
    parser.add_argument(
        "--append",
        metavar="FILE",
        help="add the line to this file of tokens; then only the token is printed",
    )


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
            "The first line is the token, shown only now; the second is for --auth-tokens.",
            file=sys.stderr,
        )
        return 0
    try:
        # Hashes are no secret, but who has which access is nobody else's business.
        handle = os.open(args.append, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    except OSError as error:
        raise CommandError(f"can't write {args.append!r}: {error.strerror or error}") from None
    print(token)
    return 0
