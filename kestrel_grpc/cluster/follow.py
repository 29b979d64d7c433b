"""Follower: asks a directory where the servers are, and writes that to files whenever it changes.

Envoy reads the one, scripts the other. If the directory does not answer, or lists no server, the files stay as they
are: clients and Envoy check the health of each server themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from .directory import Server, endpoints, from_json

logger = logging.getLogger(__name__)

EVERY_S = 1.0
_ANSWER_S = 5.0
_MOST_BYTES = 8 * 1024 * 1024


class DirectoryError(Exception):
    """The directory does not answer as one. The message is one line."""


def check_url(url: str) -> None:
    """Raises DirectoryError."""
    if not url.startswith(("http://", "https://")):
        raise DirectoryError(f"{url}: must be http://HOST:PORT/NAME")


def ask(url: str) -> list[Server]:
    """The servers that the directory at ``url`` lists. Raises DirectoryError."""
    check_url(url)
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
            text = answer.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"answers with more than {_MOST_BYTES} bytes")
        return from_json(json.loads(text))
    except urllib.error.HTTPError as error:
        why = error.read(200).decode(errors="replace").strip() or error.reason
        if error.code == 404:
            why = (
                why.rstrip(".")
                + "; the path is the name of the application, /kestrel unless --application says another"
            )
        raise DirectoryError(f"{url}: HTTP {error.code}: {why}") from None
    except RecursionError:
        raise DirectoryError(f"{url}: is not the answer of a directory") from None
    except urllib.error.URLError as error:
        raise DirectoryError(
            f"{url}: no directory answers there ({error.reason}); kestrel-grpc cluster up starts one"
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        raise DirectoryError(f"{url}: {error}") from None


@dataclass(slots=True)
class Follower:
    """``addresses_file``: gets an address a line. ``endpoints_file``: gets what Envoy's EDS reads. ``written``: is set
    once they have been written."""

    url: str
    addresses_file: Path | None = None
    endpoints_file: Path | None = None
    ask: Callable[[str], list[Server]] = ask
    written: asyncio.Event = field(default_factory=asyncio.Event)
    _last: tuple[str, ...] = ()
    _complained: bool = False

    async def run(self, stopping: asyncio.Event) -> None:
        """Follows until ``stopping``. Raises OSError."""
        while not stopping.is_set():
            if await asyncio.to_thread(self.follow):
                self.written.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), EVERY_S)

    def follow(self) -> bool:
        """Asks once. Returns whether the servers have changed. Raises OSError if a file cannot be written."""
        try:
            found = self.ask(self.url)
        except DirectoryError as error:
            self._complain("%s; the files stay as they are", error)
            return False
        addresses = tuple(server.address for server in found)
        if not addresses:
            self._complain("%s lists no server; the files stay as they are", self.url)
            return False
        self._complained = False
        if addresses == self._last:
            return False
        self._write(found)
        self._last = addresses
        logger.info("%d servers: %s", len(addresses), ", ".join(addresses))
        return True

    def _write(self, found: Sequence[Server]) -> None:
        if self.addresses_file is not None:
            _replace(self.addresses_file, "".join(f"{each.address}\n" for each in found))
        if self.endpoints_file is not None:
            _replace(self.endpoints_file, json.dumps(endpoints(found), indent=1) + "\n")

    def _complain(self, message: str, *values: object) -> None:
        if not self._complained:
            logger.warning(message, *values)
        self._complained = True


def _replace(path: Path, text: str) -> None:
    """Readers see the old or the new file. Envoy notices only files that are moved to their place."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    os.replace(new, path)
