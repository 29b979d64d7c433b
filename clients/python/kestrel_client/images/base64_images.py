"""Images in text: data URLs, and base64 alone. Owns the forms of base64 that are read, for every interface."""

from __future__ import annotations

import base64
import re
from urllib.parse import unquote_to_bytes

_BLANKS = b"\t\n\f\r "
_STANDARD = bytes.maketrans(b"-_", b"+/")
"""The letters of base64's alphabet for URLs, as those of the standard one."""
_IS_BASE64 = re.compile(r";[ ]*base64\s*$", re.IGNORECASE)
_LONGEST_HEADER = 1024
EXAMPLE = "data:image/jpeg;base64,…"


def is_data_url(text: str) -> bool:
    return text[:64].lstrip()[:5].lower() == "data:"


def decoded_image(text: str) -> bytes:
    """The bytes in a data URL with base64, or in base64 alone.

    Reads what the forgiving decoder of WHATWG's Infra standard reads (no padding, white space at any place), and the
    alphabet for URLs. Raises ValueError, whose text says what is wrong.
    """
    begin = 0
    if is_data_url(text):
        begin = text.find(",", 0, _LONGEST_HEADER) + 1
        if not begin or not _IS_BASE64.search(text[: begin - 1]):
            raise ValueError(f"must be a data URL like {EXAMPLE}")
    try:
        raw = text.encode("ascii")[begin:]
        if begin and b"%" in raw:
            raw = unquote_to_bytes(raw)
        raw = raw.translate(_STANDARD, _BLANKS)
        if len(raw) % 4:
            raw += b"=" * (-len(raw) % 4) if b"=" not in raw[-2:] else b"!"
        return base64.b64decode(raw, validate=True)
    except ValueError:  # Of the text's letters too.
        raise ValueError(f"is not valid base64; send a data URL like {EXAMPLE}") from None
