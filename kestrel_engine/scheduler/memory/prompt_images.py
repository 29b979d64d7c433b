"""PromptImages: where the images of one prompt lie, in tokens, positions and pages. Immutable.

The positions of an image attend to one another in both directions, so an image is computed as a whole, and its pages
are of use only as a whole. The first page of an image may also hold text before it, and the last page text after it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...types.requests import ImageBlock, PreparedImage
from ...types.submission import Submission
from .prefix_cache import Atom


@dataclass(frozen=True, slots=True)
class ImagePiece:
    """An image of a prompt, with the BOS before it if there is one.

    It is the tokens from ``first`` up to ``last`` of the prompt, at the positions from ``start`` up to ``end``.
    """

    image: PreparedImage
    first: int
    last: int
    start: int
    end: int

    @property
    def num_positions(self) -> int:
        return self.end - self.start

    @property
    def num_hidden(self) -> int:
        """How many more positions than tokens it has."""
        return self.num_positions - (self.last - self.first)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Whole pages that hold images: from page ``begin`` up to ``end``, with the tokens from ``first`` up to ``last``.

    ``prefix``: a key of the prompt up to the end of the run, within its namespace; None if no other sequence can share
    the run, because the prompt ends with it.
    """

    first: int
    last: int
    begin: int
    end: int
    prefix: Hashable | None


class PromptImages:
    """``pieces``: the images of the prompt, in order. ``runs``: their pages; images that share a page share a run."""

    __slots__ = ("_page_size", "pieces", "runs")

    def __init__(self, submission: Submission, page_size: int) -> None:
        self._page_size = page_size
        self.pieces = _pieces(submission)
        self.runs = _runs(self.pieces, submission, page_size) if submission.prompt else ()

    @property
    def num_hidden(self) -> int:
        """How many more positions than tokens the prompt has."""
        return sum(piece.num_hidden for piece in self.pieces)

    def num_tokens(self, num_positions: int) -> int:
        """The tokens that the first ``num_positions`` positions hold. These end in no image."""
        return num_positions - sum(p.num_hidden for p in self.pieces if p.end <= num_positions)

    def atoms(self, tokens: Sequence[Hashable], num_pages: int) -> list[Atom]:
        """The whole atoms that the first ``num_pages`` pages hold. ``tokens``: the prompt, and the tokens after it."""
        atoms: list[Atom] = []
        token = page = 0
        for run in self.runs:
            atoms += self._text_atoms(tokens, token, min(run.begin, num_pages) - page)
            if run.end > num_pages:
                return atoms
            atoms.append(Atom(tuple(tokens[run.first : run.last]), run.end - run.begin))
            token, page = run.last, run.end
        return atoms + self._text_atoms(tokens, token, num_pages - page)

    def _text_atoms(self, tokens: Sequence[Hashable], first: int, num_pages: int) -> list[Atom]:
        size = self._page_size
        starts = range(first, first + num_pages * size, size)
        return [Atom(tuple(tokens[start : start + size]), 1) for start in starts]


def _pieces(submission: Submission) -> tuple[ImagePiece, ...]:
    if not submission.images:
        return ()
    if submission.reads is not None:
        return (ImagePiece(submission.images[0], 0, 0, 0, 0),)
    images = iter(submission.images)
    pieces: list[ImagePiece] = []
    position = 0
    for index, token in enumerate(submission.prompt):
        if not isinstance(token, ImageBlock):
            position += 1
            continue
        image = next(images)
        assert image.key == token.key, (image.key, token.key)
        # A BOS is the first token of a prompt only, and attends to an image that follows it directly.
        joined = index == 1
        end = position + token.num_positions
        pieces.append(ImagePiece(image, index - joined, index + 1, position - joined, end))
        position = end
    assert next(images, None) is None, "an image has no place in the prompt"
    return tuple(pieces)


def _runs(
    pieces: tuple[ImagePiece, ...], submission: Submission, page_size: int
) -> tuple[PageRun, ...]:
    prompt, namespace = submission.prompt, submission.namespace
    runs: list[PageRun] = []
    for piece in pieces:
        begin, before = divmod(piece.start, page_size)
        end = -(-piece.end // page_size)
        first, last = piece.first - before, piece.last + end * page_size - piece.end
        if runs and begin < runs[-1].end:
            begin, first = runs[-1].begin, runs[-1].first
            del runs[-1]
        prefix = (namespace, prompt[:last]) if last < len(prompt) else None
        runs.append(PageRun(first, last, begin, end, prefix))
    return tuple(runs)
