"""``completion``: prints a script for bash, zsh or tcsh that completes commands and flags. shtab makes it from the
parsers."""

from __future__ import annotations

import argparse

import shtab

SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "bash: kestrel-grpc completion bash > ~/.local/share/bash-completion/completions/kestrel-grpc\n"
        "zsh:  kestrel-grpc completion zsh > a folder of $fpath, named _kestrel-grpc"
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    from .parser import COMMANDS, whole_parser

    parser, _, _ = whole_parser(COMMANDS)
    print(shtab.complete(parser, shell=args.shell))
    return 0
