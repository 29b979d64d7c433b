"""TuningApi: fine-tunes of the tuning API, by their id and step (moondream.md section 11).

The API's answer names the address of the file, which is fetched without the key and without following redirects.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ...config.adapters import AdapterSources
from ...errors import AdapterNotFound, AdapterRefused, AdapterUnavailable, ConfigError, KestrelError
from ...small_files import read_small_file
from ..references import FineTune
from .staging import NO_SPACE, Staging

_KEY_HEADER = "X-Moondream-Auth"
_TIMEOUT_S = 10.0
_MAX_ANSWER_BYTES = 1 << 16
_PIECE_BYTES = 1 << 18
_MAX_KEY_BYTES = 4096
_MOST_TRIED = 2


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class TuningApi:
    """``sources`` has the address and the key. Raises ConfigError if there is no key."""

    def __init__(self, sources: AdapterSources) -> None:
        assert sources.api is not None
        if not sources.api_key and sources.api_key_file is None:
            raise ConfigError(
                "adapter_sources.api",
                sources.api,
                "needs a key: set MOONDREAM_API_KEY or --adapter-api-key-file",
            )
        self._sources, self._api = sources, sources.api.rstrip("/")
        self._opener = urllib.request.build_opener(_NoRedirects)

    def key(self, wanted: FineTune) -> str:
        """Names the content of a checkpoint."""
        return f"tuning {self._api} {wanted.finetune}@{wanted.step}"

    def fetch(self, wanted: FineTune, staging: Staging) -> Mapping[str, str | None]:
        """Downloads a checkpoint. Raises AdapterNotFound, AdapterRefused, AdapterUnavailable, and as ``staging``."""
        name = staging.name
        with _explained(name):
            for _ in range(_MOST_TRIED):
                status = 0
                with self._open(self._address(wanted, name), {}) as answer:
                    status = answer.status
                    if status == 200:
                        return {_save(answer, staging): None}
                if status != 403:  # The address expires.
                    break
        raise AdapterUnavailable(
            f"the file of {name!r} can't be fetched: its host answers {status}; try again later"
        )

    def _address(self, wanted: FineTune, name: str) -> str:
        url = (
            f"{self._api}/v1/tuning/finetunes/{wanted.finetune}/checkpoints/{wanted.step}/download"
        )
        with self._open(url, {_KEY_HEADER: self._key()}) as answer:
            if answer.status != 200:
                raise _refusal(name, answer.status)
            data = answer.read(_MAX_ANSWER_BYTES + 1)
        try:
            address = json.loads(data)["url"] if len(data) <= _MAX_ANSWER_BYTES else None
        except (ValueError, KeyError, TypeError, RecursionError):
            address = None
        if not self._is_fetchable(address):
            raise AdapterUnavailable(f"the tuning API names no valid address for {name!r}")
        return str(address)

    def _is_fetchable(self, address: object) -> bool:
        """A file comes by https, or from the API's own host."""
        try:
            parts, own = urlsplit(str(address)), urlsplit(self._api)
            is_own = (parts.scheme, parts.netloc) == (own.scheme, own.netloc)
        except ValueError:
            return False
        return (
            isinstance(address, str)
            and "@" not in parts.netloc
            and (parts.scheme == "https" or is_own)
        )

    @contextmanager
    def _open(self, url: str, headers: Mapping[str, str]) -> Iterator[Any]:
        """The answer, whatever its status is."""
        request = urllib.request.Request(url, headers={"User-Agent": "kestrel-grpc", **headers})
        try:
            answer = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            answer = error
        with closing(answer):
            yield answer

    def _key(self) -> str:
        """Raises AdapterRefused."""
        if self._sources.api_key_file is None:
            key = str(self._sources.api_key)
        else:
            try:
                path = Path(os.path.expanduser(self._sources.api_key_file))
                key = read_small_file(path, _MAX_KEY_BYTES).decode("ascii", "replace").strip()
            except OSError as error:
                raise AdapterRefused(
                    f"this server's key of the tuning API can't be read: {error.strerror}"
                ) from None
        if not key.isascii() or not key.isprintable() or " " in key or not key:
            raise AdapterRefused("this server's key of the tuning API is not a line of letters")
        return key


def _save(answer: Any, staging: Staging) -> str:
    """Writes the file. Returns its name, with the suffix of its format."""
    length = answer.headers.get("Content-Length", "")
    staging.reserve(int(length) if length.isdecimal() else staging.max_bytes)
    partial = staging.folder / "adapter"
    with partial.open("wb") as opened:
        done = _copy(answer, opened, staging)
    if length.isdecimal() and done != int(length):
        raise AdapterUnavailable(f"the transfer of {staging.name!r} broke off; try again")
    with partial.open("rb") as opened:
        is_safetensors = opened.read(9)[8:] == b"{"
    name = "adapter.safetensors" if is_safetensors else "adapter.pt"
    partial.rename(staging.folder / name)
    return name


def _copy(answer: Any, opened: IO[bytes], staging: Staging) -> int:
    done = 0
    while piece := answer.read(_PIECE_BYTES):
        done += len(piece)
        staging.check(done)
        opened.write(piece)
    return done


def _refusal(name: str, status: int) -> Exception:
    if status == 404:
        return AdapterNotFound("adapter", f"the tuning API has no adapter {name!r}")
    if status in (401, 403):
        return AdapterRefused(f"the tuning API refuses {name!r} to this server's key ({status})")
    return AdapterUnavailable(f"the tuning API answers {status} for {name!r}; try again later")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raises errors of the transfer as AdapterUnavailable, without addresses: some are signed."""
    try:
        yield
    except KestrelError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            raise
        reason = type(getattr(error, "reason", error)).__name__
        raise AdapterUnavailable(
            f"{name!r} can't be fetched from the tuning API ({reason}); try again later"
        ) from None
