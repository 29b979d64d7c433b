"""``put`` and ``forget``: pictures kept by a running server, to be named by id in later commands."""

from __future__ import annotations

import argparse
import json
import sys

from .connection import add_connection_flags, connected
from .skills import read_image


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "put":
        parser.epilog = "Prints the id. Commands that take a picture take it in place of a file."
        parser.add_argument("image", metavar="IMAGE", help="a file, or - for standard input")
        parser.add_argument("--json", action="store_true", help="print JSON, with the size")
    else:
        parser.add_argument("image_id", metavar="ID", help="id of a picture, as put printed it")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.command == "put":
        return _put(args)
    with connected(args) as client:
        if not client.delete_image(args.image_id):
            print(f"there was no picture {args.image_id!r}", file=sys.stderr)
    return 0


def _put(args: argparse.Namespace) -> int:
    image = read_image(args.image)
    assert image is not None, "argparse asks for it"
    with connected(args) as client:
        handle = client.put_image(image)
    if args.json:
        assert handle.size is not None, "the server tells it"
        size = {"width": handle.size.width, "height": handle.size.height}
        print(json.dumps({"image_id": handle.image_id, "image_size": size}))
    else:
        print(handle.image_id)
    return 0
