"""Ids to text as they come: deltas that never split a character and, joined, equal one decode of all ids.

Owns the undelivered tail of one stream. Depends on a codec's ``decode`` only; knows no tokenizer, skill or token type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..base import TextCodec

_REPLACEMENT = "\ufffd"


class StreamingText:
    """Takes ids, returns text deltas; ``"".join(pushes) + finish() == codec.decode(all ids)``.

    The cost of a push does not grow with the text: only a short window of latest ids is decoded again. The window
    begins at a *clean* boundary, where decoding both sides apart gives the same text as decoding them together. For
    byte-level tokenizers (decode is UTF-8 of the ids' joined bytes) such a boundary stays clean once a byte follows
    it: a sequence broken by the cut would show as one more U+FFFD. No character has more than four bytes, so a window
    rarely exceeds four ids. With decoders that look across ids (leading spaces of Metaspace, WordPiece) boundaries
    often are not clean, and the window grows to the whole text: slower, still exact.

    A codec with ``append_only = False`` may change earlier text when ids are added (byte fallback); its text comes at
    the end, in one piece.
    """

    __slots__ = ("_append_only", "_codec", "_sent", "_text", "_window")

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._append_only: bool = getattr(codec, "append_only", True)
        self._window: list[int] = []
        self._text = ""
        """Text of the window."""
        self._sent = 0
        """Characters of ``_text`` that were returned."""

    def push(self, token_id: int) -> str:
        """Takes one id; returns the text that has become certain, often "" (part of a character, special token)."""
        self._window.append(token_id)
        if not self._append_only:
            return ""
        text = self._codec.decode(self._window)
        # A last U+FFFD may be the beginning of a character; all text before it is final.
        certain = max(self._sent, len(text) - text.endswith(_REPLACEMENT))
        delta = text[self._sent : certain]
        self._sent = certain
        if len(self._window) > 1:
            alone = self._codec.decode([token_id])
            # An id without text decides nothing about the boundary before it: the next bytes may still cross it.
            if alone and self._text + alone == text:
                self._window = [token_id]
                self._sent -= len(self._text)
                text = alone
            elif not alone and self._text == text and text:
                self._window.pop()
        self._text = text
        return delta

    def finish(self) -> str:
        """The rest, with an incomplete character as U+FFFD. The object is then as new."""
        rest = self._codec.decode(self._window)[self._sent :] if self._window else ""
        self._window, self._text, self._sent = [], "", 0
        return rest
