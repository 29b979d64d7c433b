"""Simulates how several servers share traces of requests: cache hits, p99 and spread for each way to choose a server.

python -m benchmarks.routing_sim [--replicas 10 100 1000] [--load F] [--quick] [--json FILE]

A replica computes one request after another. A request about an image that is in its cache takes `--hit-ms` of its GPU,
any other `--miss-ms`. It keeps the images that were used last. Nothing of Kestrel runs: the times are parameters. The
defaults are Moondream 2 on one H100 (docs/performance.md): 97 requests/s with 64 in flight, 40 % of them about an image
that was computed, give 14.6 and 3.8 ms if they have the proportion of the latencies of one request, 30.6 and 7.9 ms. An
image takes 137 MiB of the cache, so 55 GiB hold 400.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import math
import random
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from .reports.report import Report, benchmark_parser, quantile

RING_PLACES = 4096
"""Of gRPC's ring: the limit of a client."""
PREFERRED_WAIT_S = 0.25
"""With prefix-aware routing, how much longer a request may wait at a replica that has its image than at the idlest."""


@dataclass(frozen=True)
class Times:
    """Seconds of a replica's GPU that a request occupies, and of its latency without a queue."""

    miss_s: float
    hit_s: float
    alone_miss_s: float
    alone_hit_s: float
    images: int
    """Images in the cache of a replica."""


@dataclass(frozen=True)
class Request:
    at_s: float
    image: int


def zipf_trace(
    count: int, num_images: int, rate: float, exponent: float, rng: random.Random
) -> list[Request]:
    """Requests of a Poisson process about images whose popularity follows Zipf's law."""
    weights = np.arange(1, num_images + 1, dtype=float) ** -exponent
    generator = np.random.default_rng(rng.getrandbits(32))
    images = generator.choice(num_images, count, p=weights / weights.sum())
    times = np.cumsum(generator.exponential(1 / rate, count))
    return [Request(at, image) for at, image in zip(times.tolist(), images.tolist(), strict=True)]


def session_trace(
    count: int, questions: float, pause_s: float, rate: float, rng: random.Random
) -> list[Request]:
    """Sessions of a geometric number of questions about an image of their own, with pauses between them."""
    requests = []
    at_s, image = 0.0, 0
    while len(requests) < count:
        at_s += rng.expovariate(rate / questions)
        asked_s = at_s
        while True:
            requests.append(Request(asked_s, image))
            if rng.random() < 1 / questions:
                break
            asked_s += rng.expovariate(1 / pause_s)
        image += 1
    return sorted(requests, key=lambda request: request.at_s)[:count]


class Ring:
    """A hash ring of ``places`` in all, at least one for each replica."""

    def __init__(self, replicas: list[int], places: int) -> None:
        each = max(1, places // len(replicas))
        points = sorted(
            (place(f"{replica}/{n}"), replica) for replica in replicas for n in range(each)
        )
        self._hashes = [hashed for hashed, _ in points]
        self._replicas = [replica for _, replica in points]

    def walk(self, image: int) -> Iterator[int]:
        """The replicas after the place of ``image``, with repetitions."""
        start = bisect_left(self._hashes, place(str(image)))
        for n in range(len(self._replicas)):
            yield self._replicas[(start + n) % len(self._replicas)]


def place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


class Replicas:
    """The state of all replicas. ``in_flight``: requests by replica. ``free_at``: end of a queue; inf if down."""

    def __init__(self, times: Times, most: int, alive: int) -> None:
        self._times = times
        self.alive = list(range(alive))
        self.free_at = np.full(most, np.inf)
        self.free_at[:alive] = 0.0
        self.in_flight = [0] * most
        self.total_in_flight = 0
        self.holders: dict[int, set[int]] = {}
        """The replicas that have an image in their cache."""
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(most)]
        self._ends: list[tuple[float, int, int, float, int]] = []
        self._generation = [0] * most
        """How often a replica has died: ends of requests before that do not count."""

    def finish_until(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, replica, generation, _, _ = heapq.heappop(self._ends)
            if generation == self._generation[replica]:
                self.in_flight[replica] -= 1
                self.total_in_flight -= 1

    def take(self, replica: int, now_s: float, first_s: float, image: int) -> tuple[float, bool]:
        """A request begins at ``now_s`` at a replica. Returns (its end in s, whether its image was cached)."""
        cache, times = self._caches[replica], self._times
        is_hit = image in cache
        cache[image] = None
        cache.move_to_end(image)
        self.holders.setdefault(image, set()).add(replica)
        if len(cache) > times.images:
            self._drop(replica, cache.popitem(last=False)[0])
        start_s = max(now_s, float(self.free_at[replica]))
        self.free_at[replica] = start_s + (times.hit_s if is_hit else times.miss_s)
        end_s = start_s + (times.alone_hit_s if is_hit else times.alone_miss_s)
        self.in_flight[replica] += 1
        self.total_in_flight += 1
        heapq.heappush(self._ends, (end_s, replica, self._generation[replica], first_s, image))
        return end_s, is_hit

    def kill(self, replica: int) -> list[tuple[float, int]]:
        """Returns the requests that are lost: (when they were first sent, their image)."""
        lost = [(e[3], e[4]) for e in self._ends if e[1:3] == (replica, self._generation[replica])]
        self._generation[replica] += 1
        self.alive.remove(replica)
        self.free_at[replica] = np.inf
        self.total_in_flight -= self.in_flight[replica]
        self.in_flight[replica] = 0
        for image in self._caches[replica]:
            self._drop(replica, image)
        self._caches[replica].clear()
        return lost

    def start(self, replica: int, now_s: float) -> None:
        """A replica with an empty cache joins."""
        self.alive.append(replica)
        self.free_at[replica] = now_s

    def idlest(self, now_s: float, rng: random.Random) -> int:
        best = int(self.free_at.argmin())
        if self.free_at[best] > now_s:
            return best
        idle = np.flatnonzero(self.free_at <= now_s)
        return int(idle[rng.randrange(len(idle))])

    def _drop(self, replica: int, image: int) -> None:
        self.holders[image].discard(replica)


Choice = Callable[[Replicas, Ring, float, int, random.Random], int]


def at_random(
    replicas: Replicas, _ring: Ring, _now_s: float, _image: int, rng: random.Random
) -> int:
    return replicas.alive[rng.randrange(len(replicas.alive))]


def least_loaded(
    replicas: Replicas, _ring: Ring, now_s: float, _image: int, rng: random.Random
) -> int:
    return replicas.idlest(now_s, rng)


def ring_hash(
    _replicas: Replicas, ring: Ring, _now_s: float, image: int, _rng: random.Random
) -> int:
    return next(ring.walk(image))


def bounded_ring(
    replicas: Replicas, ring: Ring, _now_s: float, image: int, _rng: random.Random
) -> int:
    """At most 1.5 times the mean number of requests in progress, as in deploy/haproxy/balancer.cfg."""
    bound = math.ceil(1.5 * (replicas.total_in_flight + 1) / len(replicas.alive))
    for replica in ring.walk(image):
        if replicas.in_flight[replica] < bound:
            return replica
    raise AssertionError("some replica has no more than the mean")


def prefix_aware(
    replicas: Replicas, _ring: Ring, now_s: float, image: int, rng: random.Random
) -> int:
    """The idlest replica that has the image, unless another one is much idler. It knows every cache and queue."""
    idlest = replicas.idlest(now_s, rng)
    holders = replicas.holders.get(image)
    if not holders:
        return idlest
    best = min(holders, key=lambda replica: (replicas.free_at[replica], replica))
    waits_s = max(float(replicas.free_at[best]) - max(float(replicas.free_at[idlest]), now_s), 0)
    return best if waits_s <= PREFERRED_WAIT_S else idlest


CHOICES: dict[str, Choice] = {
    "random": at_random,
    "least loaded": least_loaded,
    "ring hash": ring_hash,
    "bounded ring": bounded_ring,
    "prefix-aware": prefix_aware,
}
SCENARIOS = ("steady", "failures", "scale-out")


@dataclass(frozen=True)
class Outcome:
    hit_rate: float
    p50_s: float
    p99_s: float
    spread: float
    """Requests of the busiest replica divided by the mean."""
    lost: int
    """Requests that were sent again because their replica died."""


def simulate(
    trace: list[Request],
    choice: Choice,
    num_replicas: int,
    times: Times,
    scenario: str = "steady",
    places: int = RING_PLACES,
    seed: int = 0,
) -> Outcome:
    """Replays ``trace``.

    "failures": a tenth of the replicas dies after 40 % of the requests and comes back, with empty caches, after 70 %.
    "scale-out": a tenth of the replicas joins after half of the requests. The first fifth of the requests fills the
    caches and is not counted.
    """
    rng = random.Random(seed)
    tenth = max(1, num_replicas // 10)
    first = num_replicas - (tenth if scenario == "scale-out" else 0)
    replicas = Replicas(times, num_replicas, first)
    ring = Ring(replicas.alive, places)
    counted, hits, lost = len(trace) // 5, 0, 0
    latencies: list[float] = []
    taken: Counter[int] = Counter()
    ends: dict[tuple[float, int], float] = {}

    def send(now_s: float, first_s: float, image: int, is_counted: bool) -> None:
        nonlocal hits
        replica = choice(replicas, ring, now_s, image, rng)
        end_s, is_hit = replicas.take(replica, now_s, first_s, image)
        if is_counted:
            taken[replica] += 1
            hits += is_hit
            ends[first_s, image] = end_s - first_s

    for number, request in enumerate(trace):
        now_s = request.at_s
        replicas.finish_until(now_s)
        dying = scenario == "failures" and number == 4 * len(trace) // 10
        if dying:
            again = [each for replica in range(tenth) for each in replicas.kill(replica)]
            ring = Ring(replicas.alive, places)
            lost += len(again)
            for first_s, image in again:
                send(now_s, first_s, image, True)
        if (scenario == "failures" and number == 7 * len(trace) // 10) or (
            scenario == "scale-out" and number == len(trace) // 2
        ):
            joining = range(tenth) if scenario == "failures" else range(first, num_replicas)
            for replica in joining:
                replicas.start(replica, now_s)
            ring = Ring(replicas.alive, places)
        send(now_s, now_s, request.image, number >= counted)
    latencies = sorted(ends.values())
    mean = sum(taken.values()) / num_replicas
    return Outcome(
        hits / sum(taken.values()),
        quantile(latencies, 0.5),
        quantile(latencies, 0.99),
        max(taken.values()) / mean,
        lost,
    )


def main() -> None:
    parser = benchmark_parser("routing_sim", __doc__)
    add_flags(parser)
    args = parser.parse_args()
    check(parser, args)
    times = Times(
        args.miss_ms / 1e3,
        args.hit_ms / 1e3,
        args.alone_miss_ms / 1e3,
        args.alone_hit_ms / 1e3,
        args.cached_images,
    )
    report = Report("routing_sim", vars(args))
    for num_replicas in args.replicas:
        # A share of what all replicas can compute if 60 % of the requests are hits.
        rate = args.load * num_replicas / (0.4 * times.miss_s + 0.6 * times.hit_s)
        count = args.requests_per_replica * num_replicas // (100 if args.quick else 1)
        rng = random.Random(args.seed)
        images = args.images_per_replica * num_replicas
        traces = {
            "zipf": zipf_trace(count, images, rate, args.zipf, rng),
            "sessions": session_trace(count, args.questions, args.pause_s, rate, rng),
        }
        for kind, trace in traces.items():
            for scenario in SCENARIOS:
                title = f"{num_replicas} replicas, {kind}, {scenario}"
                for name, choice in CHOICES.items():
                    found = simulate(trace, choice, num_replicas, times, scenario, args.ring_places)
                    report.add(
                        title,
                        {
                            "choice": name,
                            "hits %": round(100 * found.hit_rate, 1),
                            "p50 ms": round(1e3 * found.p50_s, 1),
                            "p99 ms": round(1e3 * found.p99_s, 1),
                            "busiest / mean": round(found.spread, 2),
                            "sent again": found.lost,
                        },
                    )
    report.finish(args.json)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Every number must be above 0, but for the seed. ``zipf`` may be 0: all images are equally popular then."""
    for name, value in vars(args).items():
        if name in ("json", "quick", "seed"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if not (each >= 0 if name == "zipf" else each > 0):
                parser.error(f"--{name.replace('_', '-')}={each}: must be above 0")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests-per-replica", type=int, default=1000)
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity [0.7]")
    parser.add_argument("--miss-ms", type=float, default=14.6, help="GPU time of a new image")
    parser.add_argument("--hit-ms", type=float, default=3.8, help="GPU time of a cached image")
    parser.add_argument("--alone-miss-ms", type=float, default=30.6, help="latency on an idle GPU")
    parser.add_argument("--alone-hit-ms", type=float, default=7.9, help="latency on an idle GPU")
    parser.add_argument("--cached-images", type=int, default=400, help="of one replica [400]")
    parser.add_argument("--images-per-replica", type=int, default=500, help="of the Zipf trace")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent [0.9]")
    parser.add_argument("--questions", type=float, default=5.0, help="of a session, on average [5]")
    parser.add_argument("--pause-s", type=float, default=2.0, help="between questions [2]")
    parser.add_argument("--ring-places", type=int, default=RING_PLACES, help="[4096]")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    main()
