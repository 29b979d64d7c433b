"""``completion``: prints a script for bash, zsh or tcsh that completes commands and flags. shtab makes it from the
parsers."""

from __future__ import annotations

import argparse

import shtab

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    program = parser.prog.partition(" ")[0]
    parser.epilog = (
        f"bash: {parser.prog} bash > ~/.local/share/bash-completion/completions/{program}\n"
        f"zsh:  {parser.prog} zsh > a folder of $fpath, named _{program}"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    parser, _, _ = args.program.whole_parser(args.program.commands)
    print(shtab.complete(parser, shell=args.shell))
    return 0
