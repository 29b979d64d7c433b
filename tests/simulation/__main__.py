"""Runs worlds: python -m tests.simulation SEED [SEED ...] [--minutes 60]"""

import argparse
import time

from .world import World

parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
parser.add_argument("seeds", nargs="+", type=int)
parser.add_argument("--minutes", type=float, default=60, help="of simulated time (default: 60)")
given = parser.parse_args()
for seed in given.seeds:
    began = time.process_time()
    world = World(seed, given.minutes).run()
    seconds = time.process_time() - began
    print(
        f"seed {seed}: trace {world.trace}, {sum(world.watch.ends.values())} requests "
        f"{dict(world.watch.ends.most_common())}, the longest {max(world.watch.longest.values(), default=0.0):.1f} s; "
        f"{given.minutes:g} minutes in {seconds:.1f} s of CPU"
    )
