"""``models``: what a server serves, and its limits."""

from __future__ import annotations

import argparse
import dataclasses
import json

from .connection import add_connection_flags, connected


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    with connected(args) as client:
        models, server = client.list_models(), client.server_info()
    if args.json:
        described = {
            "models": [dataclasses.asdict(model) for model in models],
            "server": dataclasses.asdict(server),
        }
        print(json.dumps(described))
        return 0
    for model in models:
        print(f"{model.name}: {model.state}")
        if model.family:
            print(f"  {model.family}, {model.parameter_count / 1e6:,.1f} M parameters")
            print(f"  skills: {', '.join(model.skills)}")
            print(
                f"  context: {model.context_positions} positions, a picture takes {model.image_positions}"
            )
            print(f"  weights: {model.weights_fingerprint}")
    where = f"{server.device} {server.dtype}".strip() or "starting"
    print(f"server {server.server_version}: {where}")
    limits = server.limits
    print(
        f"  pictures up to {limits.max_image_bytes / 2**20:g} MiB and {limits.max_image_pixels / 1e6:g} megapixels: "
        f"{', '.join(server.capabilities.image_formats)}"
    )
    print(f"  {limits.max_batch_size} requests at once, {limits.max_queue} may wait")
    return 0
