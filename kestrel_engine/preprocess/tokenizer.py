"""Text to ids and back: a tokenizer.json, as the skills' TextCodec. Knows no prompt template and no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers

from ..errors import CheckpointError
from ..small_files import MIB, read_small_file

_APPEND_ONLY_DECODERS = frozenset({"ByteLevel", "Metaspace", "WordPiece", "BPEDecoder", "Fuse"})
"""Decoders under which more ids never change earlier text, a trailing incomplete UTF-8 sequence aside."""
_REPLACEMENT = "\ufffd"
LONG_TEXT = 1024
"""Characters from which a text may take a millisecond to encode, so that the event loop leaves it to a thread."""


class Tokenizer:
    """A ``tokenizers`` tokenizer with the library's defaults, as the reference uses it. Any thread may call it.
    Truncation and padding of tokenizer.json are switched off: they would cut or stretch prompts."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        # The pickled state is the decoder's own JSON; writing out the whole vocabulary to read it takes a second.
        state = "{}" if inner.decoder is None else inner.decoder.__getstate__()
        decoder = json.loads(state) or {"type": "Sequence", "decoders": []}
        parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        self.append_only: bool = all(part["type"] in _APPEND_ONLY_DECODERS for part in parts)
        """See ``detokenize.StreamingText``. True for every byte-level BPE, and so for all Moondream models."""
        self._is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        # A text with alternatives asks for 21 ids a token. A look-up without a frame of Python takes half the time.
        self.token_bytes: Callable[[int], bytes] = _TokenBytes(self._bytes_of).__getitem__
        """UTF-8 bytes of one id, which may be a part of a character; empty for a special or an unknown id.

        Without a byte-level decoder, which all Moondream models have, a part of a character is U+FFFD, and a decoder
        that looks across ids may drop the blank before a word.
        """

    @classmethod
    def from_file(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Loads tokenizer.json. ``vocab_size``: rows of the model's embedding, which ids must not exceed. Raises
        CheckpointError: file missing or unreadable, not a tokenizer, or too many ids for the model.
        """
        path = Path(path)
        try:
            text = read_small_file(path, 64 * MIB).decode()
        except OSError as error:
            raise CheckpointError(f"tokenizer {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"tokenizer {path}: is not UTF-8 text") from error
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except (
            Exception
        ) as error:  # the library raises bare Exception for whatever is wrong in the JSON
            raise CheckpointError(
                f"tokenizer {path}: is not a valid tokenizer.json: {error}"
            ) from error
        tokenizer = cls(inner)
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise CheckpointError(
                f"tokenizer {path}: has ids up to {tokenizer.vocab_size - 1}, the model only {vocab_size} embeddings; "
                "it belongs to another model"
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``. A special token spelt out in the text becomes its id, as in the reference."""
        if len(text) < LONG_TEXT:
            ids: list[int] = self._inner.encode(text).ids
        else:
            # The same ids. Only this call lets other threads run meanwhile, for 25 ms with the longest text.
            (found,) = self._inner.encode_batch([text])
            ids = found.ids
        return ids

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """Text of ``ids``; special tokens and unknown ids are left out, bytes that are no UTF-8 show as U+FFFD."""
        text: str = self._inner.decode(list(ids))
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        text = self.decode([token_id])
        if _REPLACEMENT not in text or not self._is_byte_level:
            return text.encode()
        token = self._inner.id_to_token(token_id)
        assert token is not None, "an id with a text is known"
        # As the decoder does it: a token with any other character stands for its own text.
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return text.encode()


class _TokenBytes(dict[int, bytes]):
    """The bytes of the ids that were asked for: to decode one takes some microseconds."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = found = self._bytes_of(token_id)
        return found


def _byte_characters() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for (Radford et al., GPT-2, 2019): printable
    characters of Latin-1 for their own codes, the 68 codes from 256 on for the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


_BYTES = _byte_characters()
