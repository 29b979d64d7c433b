"""``bench``: loads a running server in stages and measures it from the client's place.

Times include the network. The repository's other benchmarks measure parts of the server, with less noise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from kestrel_client import AsyncKestrelClient

from ...version import __version__
from .. import DEMO_IMAGE
from ..connection import open_async_client, sdk_errors
from ..files import check_writable
from ..flags import SettingsError
from ..parser import EXIT_FAILED, EXIT_INTERRUPTED, CommandError
from ..requests.flags import request_options
from .comparison import compare, print_comparison
from .flags import ESSENTIAL as ESSENTIAL
from .flags import REMOVED as REMOVED
from .flags import add_arguments as add_arguments
from .flags import stages_of
from .mix import Mix
from .results import Plain, describe_machine, figures, read_figures, stage_result, write_results
from .sample_images import Image, make_images, open_images
from .sender import PER_CONNECTION, Plan, Stage, run_stage
from .tally import Slo
from .text import stage_table, summary

_SETTINGS = (
    *("server", "concurrency", "rate", "seconds", "warm_up", "drain", "max_in_flight", "seed"),
    *("mix", "question", "object", "max_tokens", "temperature", "unary", "model", "adapter"),
    *("max_crops", "made_up", "size", "unique_images", "slo", "timeout"),
)
_OPTIONS = (
    # Clients with the same target would otherwise share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A retry would hide a refusal, and add to the load.
    ("grpc.enable_retries", 0),
)


def run(args: argparse.Namespace) -> int:
    if args.compare:
        return _compare(args)
    if args.output:
        check_writable(args.output)
    args.question = args.question or ("What is in this image?",)
    args.object = args.object or ("red circle",)
    stages, plan = stages_of(args), _plan(args)
    content: Plain = {
        "benchmark": "load",
        "format": 2,
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "machine": describe_machine(),
        "client_version": __version__,
        "results": [],
    }
    try:
        with sdk_errors(args):
            asyncio.run(_measure(args, stages, plan, content))
    except KeyboardInterrupt:
        if not content["results"]:
            raise
        return EXIT_INTERRUPTED
    if args.json:
        print(json.dumps(summary(content["results"])))
    return 0


async def _measure(
    args: argparse.Namespace, stages: Sequence[Stage], plan: Plan, content: Plain
) -> None:
    """Adds the results of the stages to ``content``, and prints them."""
    most = args.max_in_flight if args.rate else max(stage.level for stage in stages)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(open_async_client(args, _OPTIONS))
            for _ in range(1 + round(most - 1) // PER_CONNECTION)
        ]
        content["server"] = await _describe(clients[0])  # Fails if there is no server.
        for stage in stages:
            tally, health = await run_stage(clients, plan, stage)
            if not content["results"] and not tally.succeeded:
                ((error, _),) = tally.errors.most_common(1) or [("no request ended in time", 0)]
                raise CommandError(f"no request succeeded: {error}")
            result = stage_result(stage, tally, health)
            content["results"].append(result)
            content["figures"] = figures(content["results"])
            if args.output:
                write_results(args.output, content)
            if not args.json:
                print(
                    stage_table(result), end="\n\n" if stage is not stages[-1] else "\n", flush=True
                )
            if result["overloaded"]:
                break


async def _describe(client: AsyncKestrelClient) -> dict[str, Any]:
    """The server and its model."""
    server, model = await client.server_info(), await client.get_model()
    facts = ("device", "device_name", "dtype", "max_batch_size", "weights_fingerprint")
    return {**server.to_dict(), **{name: getattr(model, name) for name in facts}}


def _plan(args: argparse.Namespace) -> Plan:
    """Raises SettingsError and CommandError."""
    limits = (args.slo.get(name) for name in ("latency", "ttft", "itl"))
    own = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return Plan(
        mix=Mix(args.mix, args.question, args.object),
        images=_images(args),
        unique_share=args.unique_images,
        slo=Slo(*(None if limit is None else limit / 1e3 for limit in limits)),
        options={**request_options(args), **own},
        streaming=not args.unary,
    )


def _images(args: argparse.Namespace) -> Sequence[Image]:
    """The images of a run. Raises SettingsError and CommandError."""
    if args.words and args.made_up:
        raise SettingsError("--made-up: images are given; leave out one of both")
    if args.made_up:
        width, height = args.size
        return make_images(args.made_up, width, height, args.seed)
    images = open_images(args.words) if args.words else [DEMO_IMAGE.read_bytes()]
    if args.unique_images and not all(isinstance(image, bytes) for image in images):
        raise SettingsError("--unique-images: needs images that the client has; an id was given")
    return images


def _compare(args: argparse.Namespace) -> int:
    """Compares two stored runs. Returns the exit status."""
    if args.words:
        raise SettingsError("--compare: sends no requests, so it takes no images")
    old, new = map(read_figures, args.compare)
    found = compare(old, new)
    if not found:
        raise CommandError("nothing to compare: no stage of both has the same load")
    return EXIT_FAILED if print_comparison(found, args.tolerance) else 0
