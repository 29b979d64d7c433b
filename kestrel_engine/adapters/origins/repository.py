"""HubRepositories: adapters in repositories of the hub, with huggingface_hub.

The library's settings name the hub (HF_ENDPOINT) and the token (HF_TOKEN). The commit of a branch is looked up again
after some minutes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub as hf
from huggingface_hub import errors as hf_errors
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the transport's base, of httpx or httpx2
from huggingface_hub.utils.tqdm import tqdm as hf_tqdm

from ...errors import (
    AdapterNotFound,
    AdapterRefused,
    AdapterUnavailable,
    AdapterUnfit,
    KestrelError,
)
from ..files import SUFFIXES
from ..peft import CONFIG_NAME
from ..references import Repository
from .staging import NO_SPACE, Staging

_TIMEOUT_S = 10.0
_MAX_CONFIG_BYTES = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_USUAL = "adapter_model.safetensors"
_CACHE = ".hub"


class HubRepositories:
    """``endpoint``: None stands for the library's setting."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def key(self, wanted: Repository, commit: str) -> str:
        """Names the content of a repository at a commit."""
        return f"hub {self._endpoint or hf.constants.ENDPOINT} {wanted.repo}@{commit}"

    def commit(self, wanted: Repository, name: str) -> str:
        """The commit that a name means now. Raises AdapterNotFound, AdapterRefused, AdapterUnavailable."""
        if _COMMIT.fullmatch(wanted.revision):
            return wanted.revision
        return str(self._info(wanted, name, files=False).sha)

    def fetch(self, wanted: Repository, commit: str, staging: Staging) -> Mapping[str, str | None]:
        """Downloads an adapter's files. Raises as ``commit``, and AdapterUnfit unless there is exactly one."""
        at = Repository(wanted.repo, commit)
        sizes, digests = {}, {}
        for sibling in self._info(at, staging.name, files=True).siblings or ():
            sizes[sibling.rfilename] = int(sibling.size or 0)
            digests[sibling.rfilename] = sibling.lfs.sha256 if sibling.lfs is not None else None
        weights = _weights(sizes, staging.name)
        files = [weights, *([CONFIG_NAME] if CONFIG_NAME in sizes else [])]
        if sizes.get(CONFIG_NAME, 0) > _MAX_CONFIG_BYTES:
            raise AdapterUnfit("adapter", f"{staging.name!r}: {CONFIG_NAME} has too many bytes")
        staging.reserve(sum(sizes[file] for file in files))
        try:
            for file in files:
                self._download(at, file, staging)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in NO_SPACE:
                raise
            raise self._explained(staging.name, error) from None
        finally:
            shutil.rmtree(staging.folder / _CACHE, ignore_errors=True)
        return {file: digests[file] for file in files}

    def _download(self, at: Repository, file: str, staging: Staging) -> None:
        made = hf.hf_hub_download(
            at.repo,
            file,
            revision=at.revision,
            cache_dir=staging.folder / _CACHE,
            endpoint=self._endpoint,
            tqdm_class=_watch(staging),
        )
        staging.check()
        Path(made).resolve().rename(staging.folder / file)

    def _info(self, wanted: Repository, name: str, *, files: bool) -> Any:
        try:
            return hf.HfApi(endpoint=self._endpoint).model_info(
                wanted.repo, revision=wanted.revision, files_metadata=files, timeout=_TIMEOUT_S
            )
        except (HTTPError, OSError, ValueError) as error:
            raise self._explained(name, error) from None

    def _explained(self, name: str, error: Exception) -> Exception:
        """The error as ours. Its text holds neither tokens nor addresses."""
        if isinstance(error, KestrelError):
            return error
        if isinstance(error, (hf_errors.RevisionNotFoundError, hf_errors.EntryNotFoundError)):
            return AdapterNotFound("adapter", f"the hub has no adapter {name!r}")
        if isinstance(error, hf_errors.HFValidationError):
            return AdapterNotFound("adapter", f"{name!r} is no repository of the hub")
        if isinstance(error, hf_errors.GatedRepoError):
            return AdapterRefused(f"{name!r} is gated, and this server has no access to it")
        if isinstance(error, hf_errors.HfHubHTTPError):
            return _of_status(name, error.response.status_code)
        return AdapterUnavailable(
            f"the hub can't be reached for {name!r} ({type(error).__name__}); try again later"
        )


def _of_status(name: str, status: int) -> Exception:
    if status in (401, 404):
        return AdapterNotFound(
            "adapter", f"the hub has no adapter {name!r}, or hides it from this server"
        )
    if status == 403:
        return AdapterRefused(f"the hub refuses {name!r} to this server (403)")
    return AdapterUnavailable(f"the hub answers {status} for {name!r}; try again later")


def _weights(sizes: Mapping[str, int], name: str) -> str:
    """The file of the adapter's tensors. Raises AdapterUnfit."""
    top = [file for file in sizes if "/" not in file and file.endswith(SUFFIXES)]
    if _USUAL in top:
        return _USUAL
    for suffixes in (SUFFIXES[:1], SUFFIXES[1:]):
        found = sorted(file for file in top if file.endswith(suffixes))
        if len(found) == 1:
            return found[0]
        if found:
            raise AdapterUnfit(
                "adapter", f"{name!r} holds several files of tensors and no {_USUAL}"
            )
    raise AdapterUnfit("adapter", f"{name!r} holds no file of tensors ({', '.join(SUFFIXES)})")


def _watch(staging: Staging) -> type[hf_tqdm]:
    """A progress bar for the library that draws nothing, and ends a download that must end."""

    class Bar(hf_tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            staging.check(int(self.n))

    return Bar
