"""``put`` and ``forget``: store images on a running server, and delete them. Other commands can name them by id."""

from __future__ import annotations

import argparse
import sys

from kestrel_client import KestrelClient
from kestrel_client.values.plain import plain_value

from ..connection import add_connection_flags, ask_each, connected
from .inputs import IMAGE_HELP, Input, open_inputs
from .output import print_json


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "put":
        parser.epilog = (
            "Prints one id per line. Commands that take an image accept an id in place of a file."
        )
        parser.add_argument("words", metavar="IMAGE", nargs="+", help=IMAGE_HELP)
        parser.add_argument("--json", action="store_true", help="print JSON, with image sizes")
    else:
        parser.add_argument("image_id", metavar="ID", help="id of an image, as put prints it")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.command == "put":
        return _put(args)
    with connected(args) as client:
        if not client.delete_image(args.image_id):
            print(f"image {args.image_id!r} was not stored", file=sys.stderr)
    return 0


def _put(args: argparse.Namespace) -> int:
    def put(client: KestrelClient, image: Input) -> bool:
        handle = client.put_image(image.source)
        if args.json:
            print_json({"image_id": handle.image_id, "image_size": plain_value(handle.size)})
        else:
            print(handle.image_id, flush=True)
        return True

    return ask_each(args, open_inputs(args.words), put)
