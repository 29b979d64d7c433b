"""``kestrel-grpc serve --workers N`` whose workers have a device that waits and computes nothing.

python -m benchmarks.service.paced_workers --load-s 10 --workers 8 FLAGS OF SERVE…

The device takes the times of Moondream 2 on one H100 (docs/lab/performance.md). All else is real: the supervisor, the
template, the front, and each worker with its gRPC server, scheduler, skills and processes that decode images. So many
workers fit few cores. ``--load-s`` is the time that a model takes to load.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

# The supervisor must import neither gRPC nor torch, and the template no numpy before it says how.
from kestrel_grpc.workers import template

if TYPE_CHECKING:
    from kestrel_engine import InferenceEngine, RuntimeConfig

STEP_S, CROP_S = 0.005, 0.004
_TEMPLATE = "--template"


async def create(load_s: float, config: RuntimeConfig, **options: Any) -> InferenceEngine:
    """As InferenceEngine.create."""
    from kestrel_engine import InferenceEngine

    from ..overhead.paced_device import paced_build

    await asyncio.sleep(load_s)
    config = dataclasses.replace(config, max_batch_size=64, max_seq_length=2048)
    built = paced_build(config, step_s=STEP_S, staging_s=0.0, crop_s=CROP_S, family="moondream3")
    return await InferenceEngine.warmed(
        config, built, skills=options["skills"], observer=options["observer"]
    )


def run_worker(load_s: float, arguments: list[str]) -> int:
    from kestrel_grpc.workers import worker

    return worker.main(arguments, partial(create, load_s))


def main() -> int:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--load-s", type=float, default=0.0)
    own.add_argument(_TEMPLATE, action="store_true")
    args, others = own.parse_known_args()
    if args.template:
        modules = (*template.MODULES, "benchmarks.overhead.paced_device")
        return template.main(others, modules, partial(run_worker, args.load_s))

    from kestrel_grpc.cli import program
    from kestrel_grpc.workers import forks

    load = f"--load-s={args.load_s}"
    forks.COMMAND = (sys.executable, "-m", "benchmarks.service.paced_workers", load, _TEMPLATE)
    return program.main(["serve", *others])


if __name__ == "__main__":
    sys.exit(main())
