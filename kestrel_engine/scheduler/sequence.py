"""Sequence: one request as the scheduler sees it - positions, pages, phase. Knows no text and no skill."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ..requests import PreparedImage, Prompt, SamplingParams, Token, num_positions
from ..step import StepToken, TokenRule


class Phase(enum.Enum):
    """Where a sequence is. PAUSED: its token is being looked at, it waits for its next rule."""

    WAITING = "waiting"
    PREFILL = "prefill"
    PAUSED = "paused"
    DECODE = "decode"
    FINISHED = "finished"


_LEGAL = {
    (Phase.WAITING, Phase.PREFILL),
    (Phase.PREFILL, Phase.PAUSED),
    (Phase.PAUSED, Phase.DECODE),
    (Phase.DECODE, Phase.PAUSED),
    *((phase, Phase.FINISHED) for phase in Phase if phase is not Phase.FINISHED),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """What is asked for (fixed), and how far it is (owned by the scheduler)."""

    sequence_id: int
    prompt: Prompt
    image: PreparedImage | None
    sampling: SamplingParams
    rule: TokenRule
    max_tokens: int
    """Most tokens that will ever be sampled; pages for all of them are reserved on admission."""

    phase: Phase = Phase.WAITING
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Positions whose KV is in the pages."""
    num_sampled: int = 0
    next_input: Token | None = None
    """The sampled token that the next decode row feeds."""

    @property
    def num_prompt_positions(self) -> int:
        return num_positions(self.prompt)

    @property
    def num_reserved_positions(self) -> int:
        """The last sampled token is never fed."""
        return self.num_prompt_positions + self.max_tokens - 1

    def move(self, phase: Phase) -> None:
        """Raises AssertionError for a transition that is not in the table."""
        assert (self.phase, phase) in _LEGAL, (
            f"sequence {self.sequence_id} can't go from {self.phase.value} to {phase.value}"
        )
        self.phase = phase

    def take(self, token: StepToken) -> None:
        """Notes the sampled token and waits for the next rule."""
        self.next_input = token.as_input()
        self.num_sampled += 1
        self.move(Phase.PAUSED)
