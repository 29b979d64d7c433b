"""``put`` and ``forget``: store images on a running server, and delete them. Other commands can name them by id."""

from __future__ import annotations

import argparse
import json
import sys

from kestrel_client import KestrelClient

from ..connection import add_connection_flags, connected, reported_failures
from ..parser import EXIT_FAILED
from .inputs import IMAGE_HELP, Input, open_inputs


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
    inputs, failed = open_inputs(args.words), 0
    with connected(args) as client:
        for image in inputs:
            with reported_failures(image.name, alone=len(inputs) == 1) as attempt:
                _put_one(client, image, args.json)
            failed += attempt.failed
    return EXIT_FAILED if failed else 0


def _put_one(client: KestrelClient, image: Input, as_json: bool) -> None:
    handle = client.put_image(image.source)
    if not as_json:
        print(handle.image_id, flush=True)
        return
    assert handle.size is not None, "put_image returns the size"
    size = {"width": handle.size.width, "height": handle.size.height}
    print(json.dumps({"image_id": handle.image_id, "image_size": size}), flush=True)
