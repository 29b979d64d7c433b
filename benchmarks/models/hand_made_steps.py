"""HandMadeSteps: creates StepPlans without a scheduler, to measure a runtime.

It owns the pages and the sequence ids of its sequences. Nothing else may use the runtime at the same time.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kestrel_engine.runtime.protocol import Runtime
from kestrel_engine.types.requests import PreparedImage, SamplingParams, Token, num_positions
from kestrel_engine.types.step import (
    PREVIOUS,
    EncodeSlice,
    Row,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenRule,
)

_ids = itertools.count(1 << 40)
"""Sequences and steps: far from an engine's own."""


@dataclass(frozen=True)
class Held:
    """A sequence with pages for all its positions. The first ``borrowed`` pages belong to another sequence."""

    sequence_id: int
    pages: tuple[int, ...]
    borrowed: int = 0


class HandMadeSteps:
    """``rule``: the ids that may be sampled, greedily. Pages are allocated in a random order, as in a cache in use."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        rule: TokenRule | None = None,
    ) -> None:
        self.runtime = runtime
        self._rule = rule or TokenRule()
        self._free = list(range(runtime.limits.num_pages))
        random.Random(0).shuffle(self._free)

    def hold(self, positions: int, beginning: tuple[int, ...] = ()) -> Held:
        """Allocates pages for ``positions``. ``beginning``: pages of another sequence to begin with."""
        count = -(-positions // self.runtime.limits.page_size) - len(beginning)
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = tuple(self._free.pop() for _ in range(count))
        return Held(next(_ids), beginning + pages, len(beginning))

    def end(self, held: Sequence[Held], images: Sequence[str] = ()) -> None:
        """Frees the pages and ends the sequences and images in the runtime."""
        ended = tuple(h.sequence_id for h in held)
        for one in held:
            self._free += one.pages[one.borrowed :]
        self.run(StepPlan(next(_ids), ended=ended, drop_images=tuple(images)))

    def run(self, plan: StepPlan) -> StepResult:
        """Runs one step and waits for its result."""
        return self.runtime.collect(self.runtime.launch(plan))

    def row(
        self, held: Held, tokens: tuple[Token, ...], start: int, *, draw: int | None = None
    ) -> Row:
        """Returns a row of ``tokens`` from position ``start`` on. ``draw``: sample the request's n-th token after."""
        used = -(-(start + num_positions(tokens)) // self.runtime.limits.page_size)
        return Row(held.sequence_id, tokens, start, held.pages[:used], self._sample(draw))

    def prefill(self, rows: Sequence[Row]) -> StepResult:
        return self.run(StepPlan(next(_ids), prefill=tuple(rows)))

    def encode(self, images: Sequence[PreparedImage]) -> StepResult:
        """Encodes all crops of ``images`` in one step. Their embeddings are kept until ``end`` names them."""
        pieces = tuple(EncodeSlice(image, 0, image.num_crops) for image in images)
        return self.run(StepPlan(next(_ids), encode=pieces))

    def decode(self, rows: Sequence[Row]) -> StepResult:
        return self.run(StepPlan(next(_ids), decode=tuple(rows)))

    def decode_plans(self, held: Sequence[Held], start: int, count: int) -> list[StepPlan]:
        """Returns ``count`` steps from position ``start`` on. Each sequence's input is the token that it sampled last.

        Page tables are whole from the beginning, so that a sequence may start over from an earlier position.
        """
        plans = []
        for step in range(count):
            spec = self._sample(1 + step)
            rows = [Row(h.sequence_id, (PREVIOUS,), start + step, h.pages, spec) for h in held]
            plans.append(StepPlan(next(_ids), decode=tuple(rows)))
        return plans

    def _sample(self, draw: int | None) -> SampleSpec | None:
        return None if draw is None else SampleSpec(self._rule, SamplingParams(), draw)
