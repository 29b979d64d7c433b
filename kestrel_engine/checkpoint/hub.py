"""Downloads files from the hub with huggingface_hub, and turns its errors and progress into ours.

The library reads its own environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). While the process
runs, an interrupted download resumes where it stopped. Complete files stay in the cache, and serve without a network.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub as hf
from huggingface_hub import errors as hf_errors
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the transport's base, of httpx or httpx2
from huggingface_hub.utils.tqdm import tqdm as hf_tqdm

from ..errors import DownloadError
from ..types.progress import Progress
from .catalog import HubCheckpoint, HubFile
from .checksums import HUB_NAME
from .files import INDEX_SUFFIX, shard_names
from .progress import log_progress

logger = logging.getLogger(__name__)

_USUAL_NAMES = (f"model{INDEX_SUFFIX}", "model.safetensors")
_PROBE_TIMEOUT_S = 10.0


class Hub:
    """A hub and its cache. ``endpoint`` and ``cache_dir`` default to the library's settings. With ``offline``, only the
    cache is used. Every method raises DownloadError, whose message names a remedy."""

    def __init__(
        self,
        *,
        endpoint: str | None = None,
        cache_dir: str | Path | None = None,
        progress: Progress | None = None,
        offline: bool = False,
    ) -> None:
        self._endpoint, self._cache_dir = endpoint, cache_dir
        self._report = progress or log_progress("downloading")
        self._online: bool | None = False if offline else None
        self._offline_reason = "offline was asked for" if offline else ""

    @property
    def online(self) -> bool:
        """False if the hub is offline by configuration or did not answer. Then only the cache is used."""
        return self._online is not False

    def fetch(self, file: HubFile) -> Path:
        """Returns the file's path in the cache. Downloads the file if it is not there."""
        try:
            return self._fetch(file)
        except (HTTPError, hf_errors.EntryNotFoundError, OSError, ValueError) as error:
            # The library's chained exceptions hold dozens of transport frames, which don't help a user.
            raise self._explain(file, error) from None

    def fetch_optional(self, file: HubFile) -> Path | None:
        """As `fetch`, but returns None if the repository (or, offline, the cache) has no such file."""
        try:
            return self._fetch(file)
        except hf_errors.RemoteEntryNotFoundError:
            return None
        except hf_errors.LocalEntryNotFoundError as error:
            if self._online is False:
                return None
            raise self._explain(file, error) from None
        except (HTTPError, OSError, ValueError) as error:
            raise self._explain(file, error) from None

    def fetch_checkpoint(self, checkpoint: HubCheckpoint) -> Path:
        """Returns the path of the weights, or of their index, with all shards beside it."""
        if checkpoint.file is None:
            first = self._first(checkpoint)
        else:
            first = self.fetch(HubFile(checkpoint.repo, checkpoint.revision, checkpoint.file))
        name = checkpoint.file or first.name
        if name.endswith(INDEX_SUFFIX):
            for shard in shard_names(first):
                self.fetch(
                    HubFile(checkpoint.repo, checkpoint.revision, sibling(checkpoint, shard))
                )
        return first

    def checksum(self, file: HubFile) -> str | None:
        """The hub's SHA-256 of a large file, git's SHA-1 of a small file's blob. None without an answer."""
        if self._online is None:
            self._online = self._probe(file)
        if not self._online:
            return None
        url = hf.hf_hub_url(file.repo, file.file, revision=file.revision, endpoint=self._endpoint)
        try:
            found = hf.get_hf_file_metadata(url, timeout=_PROBE_TIMEOUT_S, endpoint=self._endpoint)
        except (HTTPError, OSError, ValueError):
            return None
        return found.etag if found.etag and HUB_NAME.fullmatch(found.etag) else None

    def _first(self, checkpoint: HubCheckpoint) -> Path:
        for name in _USUAL_NAMES:
            found = self.fetch_optional(HubFile(checkpoint.repo, checkpoint.revision, name))
            if found is not None:
                return found
        if self._online is False:
            raise self._offline(HubFile(checkpoint.repo, checkpoint.revision, _USUAL_NAMES[-1]))
        raise DownloadError(
            f"{checkpoint.repo}@{checkpoint.revision} has neither {' nor '.join(_USUAL_NAMES)}; "
            f"name the file: {checkpoint.repo}@{checkpoint.revision}:FILE"
        )

    def _fetch(self, file: HubFile) -> Path:
        if self._online is None:
            self._online = self._probe(file)
        path = hf.hf_hub_download(
            file.repo,
            file.file,
            revision=file.revision,
            cache_dir=self._cache_dir,
            endpoint=self._endpoint,
            local_files_only=not self._online,
            tqdm_class=_bar_class(self._report, f"{file.repo}/{file.file}"),
        )
        return Path(path)

    def _probe(self, file: HubFile) -> bool:
        """Returns whether the hub answers. The library itself would retry for half a minute before it gives up."""
        url = hf.hf_hub_url(file.repo, file.file, revision=file.revision, endpoint=self._endpoint)
        try:
            hf.get_hf_file_metadata(url, timeout=_PROBE_TIMEOUT_S, endpoint=self._endpoint)
        except hf_errors.HfHubHTTPError:
            return True
        except (HTTPError, hf_errors.OfflineModeIsEnabled) as error:
            self._offline_reason = _first_line(error)
            logger.info("the hub can't be reached (%s); using the cache", self._offline_reason)
            return False
        return True

    def _explain(self, file: HubFile, error: Exception) -> DownloadError:
        where = f"{file.repo}@{file.revision}"
        for cause in _chain(error):
            if isinstance(cause, hf_errors.HFValidationError):
                return DownloadError(f"{file.repo!r} is not a hub id: {_first_line(cause)}")
            if isinstance(cause, hf_errors.RevisionNotFoundError):
                return DownloadError(f"{file.repo} has no revision {file.revision!r}")
            if isinstance(cause, hf_errors.RemoteEntryNotFoundError):
                return DownloadError(f"{where} has no file {file.file!r}")
            if isinstance(cause, hf_errors.GatedRepoError):
                return DownloadError(f"{where} is gated: {_access(file.repo)}")
            if isinstance(cause, hf_errors.HfHubHTTPError):
                return self._explain_status(file, cause)
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
                return DownloadError(
                    f"no space left for {file.file} of {where} in {self._cache()}; "
                    "free some, or set HF_HOME to a folder on another disk"
                )
            if isinstance(cause, PermissionError):
                return DownloadError(f"{self._cache()} can't be written: {_first_line(cause)}")
        if self._online is False:
            return self._offline(file)
        for cause in _chain(error):
            if isinstance(cause, HTTPError):
                return DownloadError(
                    f"the download of {file.file} of {where} was interrupted ({_first_line(cause)}); "
                    "start again: complete files are kept"
                )
        return DownloadError(f"{file.file} of {where}: {_first_line(error)}")

    def _explain_status(self, file: HubFile, error: hf_errors.HfHubHTTPError) -> DownloadError:
        status = error.response.status_code
        if status == 401:
            problem = "your token is not valid for it" if hf.get_token() else "no token is set"
            return DownloadError(
                f"{file.repo} does not exist or is private, and {problem} (401): "
                + _access(file.repo)
            )
        if status == 403:
            return DownloadError(f"access to {file.repo} is refused (403): {_access(file.repo)}")
        if status == 404:
            return DownloadError(f"{file.repo} is not on the hub (404)")
        return DownloadError(
            f"the hub answered {status} for {file.file} of {file.repo}; try again later"
        )

    def _offline(self, file: HubFile) -> DownloadError:
        endpoint = self._endpoint or hf.constants.ENDPOINT
        flag = "--tokenizer" if file.file.endswith("tokenizer.json") else file.flag
        named = f"name {'their folder' if flag == '--weights' else file.file} with {flag}"
        return DownloadError(
            f"{file.file} of {file.repo}@{file.revision} is not in the cache ({self._cache()}) and {endpoint} can't be "
            f"reached ({self._offline_reason}). On a connected machine run `hf download {file.repo} --revision "
            f"{file.revision}`, copy the files here and {named}"
        )

    def _cache(self) -> str:
        return str(self._cache_dir or hf.constants.HF_HUB_CACHE)


def sibling(checkpoint: HubCheckpoint, name: str) -> str:
    """Returns the name in the repository of the file ``name`` beside the weights."""
    return str(PurePosixPath(checkpoint.file or "").parent / name)


def _access(repo: str) -> str:
    return (
        f"request access at https://huggingface.co/{repo}, then set HF_TOKEN or run `hf auth login`"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _bar_class(report: Progress, name: str) -> type[hf_tqdm]:
    """Returns a progress bar class for the library that draws nothing and calls ``report``."""
    reporting: list[hf_tqdm] = []

    class Bar(hf_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            # The library's fast transport makes a second bar for the raw traffic. The first bar is the file's.
            if not reporting:
                reporting.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self is reporting[0]:
                report(int(self.n), int(self.total or 0), name)

    return Bar
