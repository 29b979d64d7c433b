"""Sequence: one request as the scheduler sees it - tokens, positions, pages, phase. Knows no text and no skill."""

from __future__ import annotations

import enum

from ..types.requests import Token
from ..types.step import PREVIOUS, Previous, StepToken
from ..types.submission import Submission
from .memory.prefix_cache import Atom, Node
from .memory.prompt_images import ImagePiece, PromptImages
from .shares import Account


class Phase(enum.Enum):
    """Where a sequence is. A preempted sequence waits again and keeps its sampled tokens."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (Phase.WAITING, Phase.RUNNING),
    (Phase.RUNNING, Phase.WAITING),
    (Phase.WAITING, Phase.FINISHED),
    (Phase.RUNNING, Phase.FINISHED),
}


class Sequence:
    """How far the scheduler is with one submission. The step thread alone reads and changes it.

    ``tokens``: the prompt, then the sampled tokens as they are fed; PREVIOUS stands for one that has not come back.
    Everything before ``cursor`` was scheduled; prefill and decode are the same thing with other numbers.
    """

    __slots__ = (
        "_page_table",
        "account",
        "admitted_at",
        "cursor",
        "epoch",
        "images",
        "in_flight",
        "needed",
        "node",
        "num_cached",
        "num_committed",
        "num_encoded_crops",
        "num_reused_crops",
        "num_sampled",
        "num_scheduled",
        "num_shared_pages",
        "pages",
        "phase",
        "rule",
        "sequence_id",
        "steps_out",
        "submission",
        "tokens",
    )

    def __init__(self, submission: Submission, page_size: int) -> None:
        self.submission = submission
        self.sequence_id = submission.sequence_id
        self.account: Account | None = None
        """The principal's, while the scheduler has the sequence."""
        self.phase = Phase.WAITING
        self.tokens: list[Token | Previous] = list(submission.prompt)
        self.images = PromptImages(submission, page_size)
        self.rule = submission.rule
        """For the next token to be sampled; None: not known until a token has come back."""
        self.cursor = 0
        self.num_scheduled = 0
        """Positions before ``cursor``."""
        self.num_committed = 0
        """Positions whose step has come back."""
        self.pages: list[int] = []
        self.num_shared_pages = 0
        """Pages at the head of ``pages`` that the last admission took from the prefix cache. The sequence writes to
        the others."""
        self.node: Node | None = None
        """The cached prefix that this sequence locks."""
        self.epoch = 0
        """Counts preemptions: rows of an earlier epoch compute nothing for this one."""
        self.in_flight = 0
        """Tokens asked for that have not come back."""
        self.num_sampled = 0
        """Tokens that have come back."""
        self.admitted_at: float | None = None
        """The instant of the first admission."""
        self.num_cached = 0
        """Positions that the first admission took from the prefix cache."""
        self.num_encoded_crops = 0
        """Crops that were encoded for this sequence. Another sequence with the same image did not need them again."""
        self.num_reused_crops = 0
        """Crops of its images that were equal to crops of earlier images."""
        self.needed: list[ImagePiece] = []
        """The images that the running sequence has yet to compute, in order. It needs their embeddings, for their
        positions or because it asks for the embeddings themselves."""
        self.steps_out: list[int] = []
        """The steps of NEW_WORK with a row of this sequence that have not come back, in order. They write to its pages,
        so it keeps these, also if it ends."""
        self._page_table: tuple[int, ...] = ()

    @property
    def queued_since(self) -> float:
        """The instant of the first admission, or of arrival before it."""
        return self.submission.arrived_at if self.admitted_at is None else self.admitted_at

    @property
    def is_waiting(self) -> bool:
        return self.phase is Phase.WAITING

    @property
    def priority(self) -> int:
        return self.submission.priority

    @property
    def num_prompt_positions(self) -> int:
        return len(self.submission.prompt) + self.images.num_hidden

    @property
    def num_planned(self) -> int:
        """Tokens sampled or asked for: the index of the next one."""
        return self.num_sampled + self.in_flight

    @property
    def num_positions(self) -> int:
        """Positions of all tokens, planned ones included."""
        return len(self.tokens) + self.images.num_hidden

    @property
    def can_decode(self) -> bool:
        """Whether one token is left to compute and the next may be sampled after it."""
        left = len(self.tokens) - self.cursor
        return (
            left == 1
            and self.cursor > 0
            and self.rule is not None
            # num_planned, without a call: asked of every running sequence before every step.
            and self.num_sampled + self.in_flight < self.submission.max_tokens
        )

    @property
    def awaits_rule(self) -> bool:
        """Whether all tokens have come back and the rule of the next one is not set. Nothing is computed until then."""
        return self.rule is None and self.num_sampled > 0 and not self.in_flight

    @property
    def needs_prefill(self) -> bool:
        # Asked of every running sequence before every step, and mostly false by the first two.
        return (
            bool(self.needed)
            or (
                self.cursor < len(self.tokens)
                and self.tokens[self.cursor] is not PREVIOUS
                and not self.can_decode
            )
        ) and not self.awaits_rule

    def replace_pages(self, pages: list[int]) -> None:
        """Sets other pages. Between two such calls ``pages`` only grows."""
        self.pages = pages
        self._page_table = ()

    def page_table(self, num_pages: int) -> tuple[int, ...]:
        """The first ``num_pages`` pages. Cached, because every token asks for it and it rarely grows."""
        if len(self._page_table) != num_pages:
            self._page_table = tuple(self.pages[:num_pages])
        return self._page_table

    def move(self, phase: Phase) -> None:
        """Raises AssertionError for a transition that is not in the table."""
        assert (self.phase, phase) in _LEGAL, (
            f"sequence {self.sequence_id} can't go from {self.phase.value} to {phase.value}"
        )
        self.phase = phase

    def atoms(self, num_pages: int) -> list[Atom]:
        return self.images.atoms(self.tokens, num_pages)

    def take(self, token: StepToken) -> None:
        """Replaces the oldest PREVIOUS by the sampled token."""
        index = len(self.submission.prompt) + self.num_sampled
        assert self.tokens[index] is PREVIOUS, (
            f"sequence {self.sequence_id} expects no token at {index}"
        )
        self.tokens[index] = token.as_input()
        self.num_sampled += 1
        self.in_flight -= 1
