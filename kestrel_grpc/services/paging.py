"""Pages of a list. The server stores nothing: a token holds the place at which its page begins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any, TypeVar

from kestrel_engine import InvalidRequest

_Item = TypeVar("_Item")

MOST, _USUAL = 1000, 100
_MOST_CHARACTERS = 1024
_BETWEEN = "\n"


def page_of(
    request: Any, items: Iterable[tuple[str, _Item]], scope: str
) -> tuple[list[_Item], str]:
    """The items of the page that ``request`` asks for, and the token of the next page, which is empty on the last one.

    Args:
        request: Has ``page_size`` and ``page_token``.
        items: All items, in order of their keys, which differ.
        scope: Names the list. A token of another list is refused.

    Raises:
        InvalidRequest: The size or the token is invalid.
    """
    size = request.page_size if request.HasField("page_size") else _USUAL
    if not 1 <= size <= MOST:
        raise InvalidRequest("page_size", f"is {size}; must be 1 to {MOST}")
    after = _key_in(request.page_token, scope) if request.page_token else None
    left = [(key, item) for key, item in items if after is None or key > after]
    shown = left[:size]
    token = _token(scope, shown[-1][0]) if len(left) > size else ""
    return [item for _, item in shown], token


def _token(scope: str, key: str) -> str:
    return base64.urlsafe_b64encode(f"{scope}{_BETWEEN}{key}".encode()).decode()


def _key_in(token: str, scope: str) -> str:
    """The key of the last item of the page before. Raises InvalidRequest."""
    if len(token) > _MOST_CHARACTERS:
        raise InvalidRequest(
            "page_token",
            f"has {len(token)} characters; the limit is {_MOST_CHARACTERS}",
            value=len(token),
            limit=_MOST_CHARACTERS,
        )
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    found, between, key = text.partition(_BETWEEN)
    if not between or found != scope:
        raise InvalidRequest(
            "page_token",
            "is not the next_page_token of this list; leave it empty for the first page",
        )
    return key
