"""Runs one attack beside a polite caller, and says what became of both."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.abuse.attacks.calls import make_expensive_images
from tests.abuse.attacks.registry import ATTACKS, MIB
from tests.abuse.target import Polite, Target


@dataclass
class Outcome:
    name: str
    ended: Counter[str]
    seconds: float
    rest_mib: float
    peak_mib: float
    after_mib: float
    polite: Polite
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        p = self.polite
        told = ", ".join(f"{what}: {count}" for what, count in self.ended.most_common(6))
        return (
            f"{self.name}: {self.seconds:.1f} s; memory +{self.peak_mib - self.rest_mib:.0f} MiB of "
            f"{self.rest_mib:.0f}, after 10 s +{self.after_mib - self.rest_mib:.0f}; polite {len(p.seconds)} calls, "
            f"p50 {p.percentile(0.5):.2f} p95 {p.percentile(0.95):.2f} p99 {p.percentile(0.99):.2f} s, "
            f"failed {dict(p.failed)}; {told}; {self.problems or 'log clean'}"
        )


async def run(
    target: Target, name: str, settle_s: float = 10.0, most_s: float = 90.0, pause_s: float = 0.0
) -> Outcome:
    """One attack, which is given up after ``most_s``, with the polite caller beside it."""
    if name == "expensive":
        await asyncio.to_thread(make_expensive_images)
    polite = Polite(target, pause_s)
    rest = target.memory()
    log_at = target.log.stat().st_size
    peak, over = rest, False

    async def look() -> None:
        nonlocal peak
        while not over:
            peak = max(peak, await asyncio.to_thread(target.memory))
            await asyncio.sleep(0.05)

    looking = asyncio.ensure_future(look())
    polite.start()
    began = time.monotonic()
    try:
        ended = await asyncio.wait_for(ATTACKS[name](target), most_s)
    except TimeoutError:
        ended = Counter({f"given up after {most_s:g} s": 1})
    seconds = time.monotonic() - began
    while len(polite.seconds) < 3 and time.monotonic() - began < 60:
        await asyncio.sleep(0.1)
    await asyncio.to_thread(polite.stop)
    await asyncio.sleep(settle_s)
    over = True
    await looking
    outcome = Outcome(name, ended, seconds, rest / MIB, peak / MIB, target.memory() / MIB, polite)
    if target.popen.poll() is not None:
        outcome.problems.append(f"the server ended with status {target.popen.returncode}")
    text = target.log.read_bytes()[log_at:].decode(errors="replace")
    outcome.problems += sorted(
        {line[24:150] for line in text.splitlines() if " E " in line[:30] or "Traceback" in line}
    )
    return outcome
