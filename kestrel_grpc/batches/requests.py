"""Reads the requests of a batch from the lines of a file, and says what is wrong with them."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import orjson

from .tables import LONGEST_ID, MOST_REQUESTS, fault

_MOST_LINES = 2 * MOST_REQUESTS
"""Empty ones count too."""
_MOST_ERRORS = 20
_MOST_VALUES = 20_000
"""Limit on the commas and opening brackets in a line, as of a body by HTTP."""


def read_requests(
    content: bytes, endpoint: str
) -> tuple[list[tuple[str, bytes]], list[dict[str, Any]]]:
    """The ids and bodies of the requests in a file, and what is wrong with its lines."""
    requests: list[tuple[str, bytes]] = []
    errors: list[dict[str, Any]] = []
    names: set[str] = set()
    # A list of lines may take fifty times the bytes of the file.
    for number, line in enumerate(BytesIO(content), 1):
        try:
            if number > _MOST_LINES:
                raise ValueError(f"the file has more than {_MOST_LINES} lines")
            if not line.strip():
                continue
            if len(requests) == MOST_REQUESTS:
                raise ValueError(f"the file has more than {MOST_REQUESTS} requests")
            name, body = _request(line, endpoint)
            if name in names:
                raise ValueError(f"custom_id: {name!r} stands twice")
            names.add(name)
            requests.append((name, body))
        except ValueError as error:
            errors.append(fault("invalid_request", str(error), number))
            if len(errors) == _MOST_ERRORS or number > _MOST_LINES:
                break
    if not requests and not errors:
        errors.append(fault("empty_file", "the file has no requests"))
    return requests, errors


def _request(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """The id and the body of one line. Raises ValueError."""
    try:
        if sum(map(line.count, (b",", b"[", b"{"))) > _MOST_VALUES:
            raise ValueError(f"the line has more than {_MOST_VALUES} values")
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError("the line must be a JSON object")
    name = values.get("custom_id")
    if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_ID:
        raise ValueError(f"custom_id: must be a text of 1 to {LONGEST_ID} characters")
    if values.get("method") != "POST" or values.get("url") != endpoint:
        raise ValueError(f"method and url: must be POST and {endpoint}, as the batch's endpoint")
    if not isinstance(values.get("body"), dict):
        raise ValueError("body: must be an object")
    try:
        return name, orjson.dumps(values["body"])
    except orjson.JSONEncodeError:  # orjson reads deeper values than it writes.
        raise ValueError("body: its objects and lists are nested too deeply") from None
