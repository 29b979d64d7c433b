"""FakeRuntime: a scripted runtime without torch, for tests of the scheduler, the loop and the service.

It samples from a script or by a hash of what each sequence was fed, so that a result depends only on its own tokens,
and it checks every plan as strictly as a device would suffer from it: pages of live rows must not overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..requests import Coord, ImageBlock, Size, Token, num_positions
from ..step import Row, RuntimeLimits, StepPlan, StepResult, StepToken

Script = Callable[[tuple[Token, ...]], int]
"""From all tokens a sequence was fed so far to the id that the model would like next."""


def hashed(fed: tuple[Token, ...], vocab_size: int = 1000) -> int:
    """A deterministic id above 20 from the tokens fed."""
    state = 1469598103934665603
    for token in fed:
        for byte in repr(token).encode():
            state = ((state ^ byte) * 1099511628211) & (2**64 - 1)
    return 21 + state % (vocab_size - 21)


class FakeRuntime:
    """Executes plans on lists of tokens. ``step_s`` sleeps that long a step, standing for the device."""

    def __init__(
        self, limits: RuntimeLimits, script: Script | None = None, *, step_s: float = 0.0
    ) -> None:
        self._limits = limits
        self._script = script or (lambda fed: hashed(fed, limits.vocab_size))
        self._step_s = step_s
        self._slots: dict[int, Token] = {}
        self._images: set[str] = set()
        self.plans: list[StepPlan] = []
        self.fail_next: Exception | None = None
        self.closed = False

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> StepPlan:
        assert not self.closed
        return plan

    def collect(self, handle: StepPlan) -> StepResult:
        self.plans.append(handle)
        if self._step_s:
            time.sleep(self._step_s)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._images |= {image.key for image in handle.encode}
        tokens = self._run((*handle.prefill, *handle.decode))
        self._images -= set(handle.drop_images)
        return StepResult(tokens=tokens)

    def close(self) -> None:
        self.closed = True

    def _run(self, rows: tuple[Row, ...]) -> dict[int, StepToken]:
        owners: dict[int, int] = {}
        for row in rows:
            for page in row.page_table:
                assert 0 <= page < self._limits.num_pages, f"page {page} does not exist"
                assert owners.setdefault(page, row.sequence_id) == row.sequence_id, (
                    f"page {page} has two writers"
                )
        tokens: dict[int, StepToken] = {}
        for row in rows:
            self._write(row)
            if row.sample is not None:
                tokens[row.sequence_id] = self._sample(row)
        return tokens

    def _write(self, row: Row) -> None:
        position = row.start
        for token in row.tokens:
            if isinstance(token, ImageBlock):
                assert token.key in self._images, f"picture {token.key} was not encoded"
            for _ in range(num_positions((token,))):
                self._slots[self._slot(row, position)] = token
                position += 1

    def _slot(self, row: Row, position: int) -> int:
        page, offset = divmod(position, self._limits.page_size)
        return row.page_table[page] * self._limits.page_size + offset

    def _sample(self, row: Row) -> StepToken:
        assert row.sample is not None
        rule = row.sample.rule
        length = row.start + num_positions(row.tokens)
        fed = tuple(self._slots[self._slot(row, p)] for p in range(length))
        wanted = self._script(fed)
        if rule.forced is not None:
            wanted = rule.forced
        elif rule.allowed is not None and wanted not in rule.allowed:
            wanted = rule.allowed[hashed(fed) % len(rule.allowed)]
        elif wanted in rule.suppressed:
            wanted = hashed(fed, self._limits.vocab_size)
        if rule.forced is None and rule.otherwise is not None and wanted != rule.stop:
            wanted = rule.otherwise
        value: Coord | Size | None = None
        if wanted == 5 and rule.read_coord:
            value = Coord(hashed(fed) % 1000 / 1000)
        elif wanted == 6 and rule.read_size:
            value = Size(hashed(fed) % 1000 / 1000, hashed(fed) % 500 / 1000)
        return StepToken(id=wanted, value=value)
