"""``models``: shows a server's model and limits; lists and removes the models that this machine has downloaded."""

from __future__ import annotations

import argparse
import dataclasses
import json

from kestrel_client.commands.parser import CommandError
from kestrel_client.commands.requests import models

from ...settings.flags import SettingsError


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "kestrel-grpc models                     show the server's model\n"
        "kestrel-grpc models downloaded          list the models in this machine's cache (HF_HOME)\n"
        "kestrel-grpc models remove moondream2   delete a model from the cache; asks first unless --yes is given"
    )
    parser.add_argument(
        "words", nargs="*", metavar="downloaded|remove", help="use this machine, not the server"
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    models.add_arguments(parser, command)


def run(args: argparse.Namespace) -> int:
    match args.words:
        case []:
            return models.run(args)
        case ["downloaded"]:
            return _downloaded(args)
        case ["remove", name]:
            return _remove(name, args)
        case ["remove"]:
            raise SettingsError("name the model to remove: kestrel-grpc models remove NAME")
    raise SettingsError(f"{args.words[0]!r}: must be downloaded, or remove NAME, or left out")


def _downloaded(args: argparse.Namespace) -> int:
    from kestrel_engine import maintenance

    found = maintenance.downloaded()
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in found]))
        return 0
    for each in found:
        print(f"{each.name}: {each.size_bytes / 1e9:,.2f} GB in {each.folder}")
    if not found:
        print("no model is downloaded; 'kestrel-grpc download MODEL' downloads one")
    return 0


def _remove(name: str, args: argparse.Namespace) -> int:
    from kestrel_engine import ConfigError, maintenance

    if not args.yes:
        try:
            reply = input(f"Delete {name} from this machine's cache? [y/N] ")
        except EOFError:
            reply = ""
        if reply.strip().lower() not in ("y", "yes"):
            raise CommandError("nothing was removed; --yes removes without asking")
    try:
        removed = maintenance.remove(name)
    except ConfigError as error:
        raise CommandError(f"{name!r} {error.limit}") from None
    print(f"removed {removed.name}: {removed.size_bytes / 1e9:,.2f} GB")
    return 0
