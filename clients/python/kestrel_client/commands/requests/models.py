"""``models``: shows a server's models and limits."""

from __future__ import annotations

import argparse
import json

from ..connection import add_connection_flags, connected


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        models, server = client.list_models(), client.server_info()
    if args.json:
        described = {"models": [model.to_dict() for model in models], "server": server.to_dict()}
        print(json.dumps(described))
        return 0
    for model in models:
        print(f"{model.name}: {model.state}")
        if model.family:
            print(f"  {model.family}, {model.num_parameters / 1e6:,.1f} M parameters")
            print(f"  skills: {', '.join(model.skill_names)}")
            print(
                f"  context: {model.context_positions} positions, an image takes {model.image_positions} "
                f"and has up to {model.max_crops} tiles"
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
