"""``models``: shows a server's model and limits; lists and removes the models that this machine has downloaded."""

from __future__ import annotations

import argparse
import dataclasses
import json

from ...settings.flags import SettingsError
from ..connection import add_connection_flags, connected
from ..parser import CommandError


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
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    match args.words:
        case []:
            return _served(args)
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


def _served(args: argparse.Namespace) -> int:
    with connected(args) as client:
        models, server = client.list_models(), client.server_info()
    if args.json:
        described = {
            "models": [model.to_dict() for model in models],
            "server": server.to_dict(),
        }
        print(json.dumps(described))
        return 0
    for model in models:
        print(f"{model.name}: {model.state}")
        if model.family:
            print(f"  {model.family}, {model.num_parameters / 1e6:,.1f} M parameters")
            print(f"  skills: {', '.join(model.skill_names)}")
            print(
                f"  context: {model.context_positions} positions, an image takes {model.image_positions}"
            )
            print(f"  {model.device} {model.dtype}, {model.max_batch_size} requests at once")
            print(f"  weights: {model.weights_fingerprint}")
    print(f"server {server.server_version}")
    limits = server.limits
    print(
        f"  images up to {limits.max_image_bytes / 2**20:g} MiB and {limits.max_image_pixels / 1e6:g} megapixels: "
        f"{', '.join(server.image_formats)}"
    )
    print(f"  {limits.max_queue} requests may wait")
    return 0
