"""Requests to the HTTP port in all dialects. The first line of an input is the path, the rest is the body.

Every request must end in one answer whose status is not 500, with nothing in the log.
"""

import re

from ..json_mutator import mutated
from ..running_server import running_server

_PATHS = re.compile(rb"/[!-~]{0,200}")
_BUSY = (501, 503)
_SERVER = running_server()


def take(data: bytes) -> None:
    path, _, body = data.partition(b"\n")
    if not _PATHS.fullmatch(path):
        return
    status, answer = _SERVER.run(lambda: _SERVER.post(path.decode(), "application/json", body))
    assert 200 <= status < 500 or status in _BUSY, (status, answer)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    path, _, body = data.partition(b"\n")
    return path + b"\n" + mutated(body, most - len(path) - 1, seed)
