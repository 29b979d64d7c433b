"""Draft: a step in the making. Owns its rows (ScheduledRow), and the crops and readings that it computes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..types.step import (
    PREVIOUS,
    EncodeSlice,
    ImageRead,
    Lane,
    RefineRow,
    Row,
    SampleSpec,
    StepPlan,
)
from .budget import Allowance
from .memory.image_memory import ImageMemory
from .memory.prompt_images import ImagePiece
from .sequence import Sequence


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's row in a step that is out: where it ends, and in which epoch it was made. Never changed; not
    frozen because one is made for every token, and that would double its cost."""

    sequence: Sequence
    epoch: int
    end_positions: int
    samples: bool
    is_prefill: bool
    images: tuple[str, ...]
    """Keys of the images that the row computes."""


class Draft:
    """``images``: the batch's, which know what is encoded."""

    def __init__(self, images: ImageMemory, page_size: int) -> None:
        self._images = images
        self._page_size = page_size
        self.encode: list[EncodeSlice] = []
        self.reads: list[ImageRead] = []
        self.prefill: list[Row] = []
        self.decode: list[Row] = []
        self.refine: list[RefineRow] = []
        self.scheduled: list[ScheduledRow] = []
        self.dropped: dict[str, bool] = {}
        """As `ImageMemory.take_dropped` returns it."""
        self.dropped_crops: tuple[str, ...] = ()
        self.is_due = False
        """Whether the step is made even if it only drops images."""
        self.after: int | None = None
        self.leave_room = False
        self.spacing_s = 0.0
        """These three as in StepPlan."""

    @property
    def is_empty(self) -> bool:
        work = self.encode or self.reads or self.prefill or self.decode or self.refine
        return not (work or self.is_due)

    def plan(self, step_id: int, lane: Lane, ended: tuple[int, ...]) -> StepPlan:
        """``ended``: as in StepPlan."""
        return StepPlan(
            step_id=step_id,
            drop_images=tuple(self.dropped),
            drop_crops=self.dropped_crops,
            ended=ended,
            encode=tuple(self.encode),
            reads=tuple(self.reads),
            prefill=tuple(self.prefill),
            decode=tuple(self.decode),
            refine=tuple(self.refine),
            lane=lane,
            after=self.after,
            leave_room=self.leave_room,
            spacing_s=self.spacing_s,
        )

    def add_decode(self, sequence: Sequence) -> None:
        """Schedules the last token of a sequence that can decode. It runs for every token of every row."""
        assert sequence.account is not None and sequence.rule is not None
        account, submission = sequence.account, sequence.submission
        account.used += account.token_cost
        token, start = sequence.tokens[-1], sequence.num_scheduled
        sequence.cursor += 1
        sequence.num_scheduled = end = start + 1
        sample = self._sample(sequence)
        self.scheduled.append(
            ScheduledRow(sequence, sequence.epoch, end, samples=True, is_prefill=False, images=())
        )
        page_table = sequence.page_table(start // self._page_size + 1)
        self.decode.append(
            Row(sequence.sequence_id, (token,), start, page_table, sample, submission.adapter)
        )

    def add_new_work(
        self, sequence: Sequence, allowance: Allowance, *, crops_only: bool = False
    ) -> None:
        """Schedules as much of a sequence's images and prompt as the allowance permits. ``crops_only``: of its next
        image only."""
        if sequence.submission.reads is not None:
            self._read(sequence, allowance)
        elif crops_only:
            self._encode(sequence, sequence.needed[0], allowance)
        else:
            self._prefill(sequence, allowance)

    def _read(
        self,
        sequence: Sequence,
        allowance: Allowance,
    ) -> None:
        """Schedules crops of an image as the allowance permits, and the reading after the last one."""
        (piece,), spec = sequence.needed, sequence.submission.reads
        assert spec is not None
        image = piece.image
        if not self._encode(sequence, piece, allowance):
            return
        allowance.take_crops(1)  # Readings cost little, but not nothing.
        self._images.release(image.key)
        sequence.needed = []
        self.reads.append(ImageRead(sequence.sequence_id, image, spec))
        self.scheduled.append(
            ScheduledRow(
                sequence, sequence.epoch, 0, samples=False, is_prefill=False, images=(image.key,)
            )
        )

    def _prefill(
        self,
        sequence: Sequence,
        allowance: Allowance,
    ) -> None:
        """Schedules as much of a prompt as the allowance permits: text in parts, each image as a whole."""
        count = 0
        computed: list[ImagePiece] = []
        while (begin := sequence.cursor + count) < len(sequence.tokens):
            piece = sequence.needed[0] if sequence.needed else None
            if piece is not None and piece.first == begin:
                if not self._encode(sequence, piece, allowance):
                    break
                if not allowance.allows_whole(piece.num_positions):
                    break
                allowance.take_positions(piece.num_positions)
                self._images.release(piece.image.key)
                computed.append(sequence.needed.pop(0))
                count += piece.last - piece.first
                continue
            end = len(sequence.tokens) if piece is None else piece.first
            text = min(end - begin, allowance.positions)
            allowance.take_positions(text)
            count += text
            if text < end - begin:
                break
        if count:
            self.prefill.append(self._row(sequence, count, tuple(computed)))

    def _encode(
        self,
        sequence: Sequence,
        piece: ImagePiece,
        allowance: Allowance,
    ) -> bool:
        """Schedules crops of an image; True once all are."""
        key = piece.image.key
        while not self._images.is_encoded(key) and allowance.crops:
            part = self._images.encode(key, allowance.crops)
            allowance.take_crops(part.last - part.first - len(part.reused))
            sequence.num_encoded_crops += part.num_encoded
            sequence.num_reused_crops += len(part.reused)
            self.encode.append(replace(part, sequence_id=sequence.sequence_id))
        return self._images.is_encoded(key)

    def _row(self, sequence: Sequence, count: int, images: tuple[ImagePiece, ...]) -> Row:
        """Schedules the next ``count`` tokens of a prompt, with ``images`` among them; samples if they are the last."""
        start = sequence.num_scheduled
        tokens = tuple(sequence.tokens[sequence.cursor : sequence.cursor + count])
        sequence.cursor += count
        end = start + count + sum(piece.num_hidden for piece in images)
        sequence.num_scheduled = end
        sample: SampleSpec | None = None
        if sequence.cursor == len(sequence.tokens):
            assert not sequence.in_flight
            sample = self._sample(sequence)
        keys = tuple(piece.image.key for piece in images)
        self.scheduled.append(
            ScheduledRow(
                sequence, sequence.epoch, end, sample is not None, is_prefill=True, images=keys
            )
        )
        page_table = sequence.page_table(-(-end // self._page_size))
        adapter = sequence.submission.adapter
        return Row(sequence.sequence_id, tokens, start, page_table, sample, adapter)

    @staticmethod
    def _sample(sequence: Sequence) -> SampleSpec:
        """Asks for the token after the last one, under the rule of the sequence, which it uses up."""
        rule = sequence.rule
        assert rule is not None
        spec = SampleSpec(rule, sequence.submission.sampling, draw=sequence.num_planned)
        sequence.rule = None
        sequence.in_flight += 1
        sequence.tokens.append(PREVIOUS)
        return spec
