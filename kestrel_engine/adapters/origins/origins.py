"""Origins: what the name of an adapter means now, and the files that it means.

Each request looks a name of the operator's folder up there. What a remote name means, and what failed, is remembered
for some time, so that requests cannot make this server ask others often.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ... import clock
from ...config.adapters import AdapterSources
from ...errors import (
    AdapterNotFound,
    AdapterRefused,
    AdaptersFull,
    AdapterUnavailable,
    AdapterUnfit,
    EngineClosed,
)
from ..files import AdapterFiles, find, found_in, names_in
from ..references import Repository, fine_tune_of, repository_of
from .disk import AdapterDisk, Fetch
from .repository import HubRepositories
from .tuning import TuningApi

MAX_WAITING = 32
"""Names that may wait for a look-up."""
REFRESH_S = 300.0
"""Seconds after which a branch of the hub is looked up again."""
FAILURE_S = 10.0
_MOST_KNOWN = 1024
_LOOK_UPS, _DOWNLOADS = 4, 4

_Lasting = (AdapterNotFound, AdapterRefused, AdapterUnavailable, AdapterUnfit)


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """What a name means. ``token`` differs if the content may. ``open``: gives the files, in any thread. ``is_remote``:
    they may have to be downloaded."""

    name: str
    token: Hashable
    open: Callable[[], AbstractContextManager[AdapterFiles]]
    is_remote: bool


@dataclass(slots=True)
class _Known:
    version: Version | None
    until: float
    error: Exception | None = None


class Origins:
    """For one event loop. ``folder``: the operator's. ``downloads``: the folder of downloaded adapters. ``most_bytes``:
    of one download. Raises ConfigError."""

    def __init__(
        self,
        folder: Path | None,
        sources: AdapterSources | None = None,
        *,
        downloads: Path | None = None,
        offline: bool = False,
        most_bytes: int = 1 << 40,
        endpoint: str | None = None,
    ) -> None:
        self._folder, self._offline = folder, offline
        self._sources = sources or AdapterSources()
        self._hub = HubRepositories(endpoint) if self._sources.hub else None
        self._api = TuningApi(self._sources) if self._sources.api is not None else None
        self.disk: AdapterDisk | None = None
        if self._sources.downloads:
            assert downloads is not None, "downloaded adapters need a folder"
            self.disk = AdapterDisk(downloads, self._sources.disk_bytes, most_bytes)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self.looking: dict[str, asyncio.Task[Version]] = {}
        self._asking = ThreadPoolExecutor(_LOOK_UPS, thread_name_prefix="kestrel-look-ups")
        self._downloading = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="kestrel-downloads")

    async def find(self, name: str) -> Version:
        """What a checked name means now. Raises AdapterNotFound, AdapterRefused, AdapterUnavailable, AdapterUnfit, and
        AdaptersFull if too many names are being looked up."""
        if self._folder is not None and repository_of(name) is None:
            local = await asyncio.to_thread(_local, self._folder, name)
            if local is not None:
                return local
        self._check_served(name)
        known = self._known.get(name)
        if known is not None and clock.now() >= known.until:
            if known.version is None or known.error is not None:
                known = None
            elif name not in self.looking and len(self.looking) < MAX_WAITING:
                self._look_up(name)  # Beside this request, which gets what was known.
        if known is None:
            if name not in self.looking and len(self.looking) >= MAX_WAITING:
                raise AdaptersFull(f"{MAX_WAITING} names of adapters are being looked up")
            task = self.looking.get(name) or self._look_up(name)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                if task.cancelled():
                    raise EngineClosed("the engine was shut down") from None
                raise
        if known.error is not None:
            raise known.error
        assert known.version is not None
        return known.version

    async def local_names(self) -> list[str]:
        """The names of the adapters in the operator's folder, in no order."""
        return [] if self._folder is None else await asyncio.to_thread(names_in, self._folder)

    async def opened(self, version: Version) -> tuple[AdapterFiles, Callable[[], None]]:
        """The files, downloaded, and what gives them back. Raises what ``Version.open`` does."""
        if not version.is_remote:
            with version.open() as found:
                return found, _nothing
        stack = ExitStack()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._downloading, stack.enter_context, version.open())
        return found, stack.close

    def note_failure(self, version: Version, error: Exception) -> None:
        """What failed is not tried again for some seconds, if it came from elsewhere."""
        if version.is_remote and isinstance(error, _Lasting):
            self._remember(version.name, _Known(None, clock.now() + FAILURE_S, error))

    async def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
        for task in self.looking.values():
            task.cancel()
        for threads in (self._asking, self._downloading):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    def _check_served(self, name: str) -> None:
        """Raises AdapterNotFound or AdapterRefused if this server looks for the name in its folder only."""
        repository, is_fine_tune = repository_of(name), fine_tune_of(name) is not None
        if repository is not None:
            if not self._sources.allows(repository.repo):
                raise AdapterRefused(
                    f"this server takes no adapters from {repository.repo!r} of the hub; ask the operator for it "
                    "(--adapter-hub)"
                )
        elif self._api is None or not is_fine_tune:
            where = " (--adapters-dir)" if self._folder is None else ""
            raise AdapterNotFound("adapter", f"there is no adapter {name!r}{where}")

    def _look_up(self, name: str) -> asyncio.Task[Version]:
        self.looking[name] = task = asyncio.create_task(self._looked_up(name))
        task.add_done_callback(retrieved)
        return task

    async def _looked_up(self, name: str) -> Version:
        loop = asyncio.get_running_loop()
        try:
            version, lasts_s = await loop.run_in_executor(self._asking, self._remote, name)
            self._remember(name, _Known(version, clock.now() + lasts_s))
            return version
        except _Lasting as error:
            known = self._known.get(name)
            if (
                known is not None
                and known.version is not None
                and isinstance(error, AdapterUnavailable)
            ):
                known.until = clock.now() + FAILURE_S  # What was known still holds.
                return known.version
            self._remember(name, _Known(None, clock.now() + FAILURE_S, error))
            raise
        finally:
            del self.looking[name]

    def _remember(self, name: str, known: _Known) -> None:
        self._known[name] = known
        self._known.move_to_end(name)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _remote(self, name: str) -> tuple[Version, float]:
        """What a name means elsewhere, and for how many seconds. Blocks."""
        repository = repository_of(name)
        if repository is not None:
            return self._of_hub(name, repository)
        wanted = fine_tune_of(name)
        assert wanted is not None and self._api is not None
        key = self._api.key(wanted)
        return self._version(name, key, partial(self._api.fetch, wanted)), REFRESH_S

    def _of_hub(self, name: str, wanted: Repository) -> tuple[Version, float]:
        assert self._hub is not None and self.disk is not None
        lasts_s = REFRESH_S
        try:
            if self._offline:
                raise AdapterUnavailable(
                    f"{name!r} is not on this server's disk, and it is offline"
                )
            commit = self._hub.commit(wanted, name)
        except AdapterUnavailable:
            # Without the hub, what was downloaded last serves.
            key = self.disk.latest(name) or ""
            commit = key.rpartition("@")[2]
            if key != self._hub.key(wanted, commit):
                raise
            lasts_s = FAILURE_S
        fetch = partial(self._hub.fetch, wanted, commit)
        return self._version(name, self._hub.key(wanted, commit), fetch), lasts_s

    def _version(self, name: str, key: str, fetch: Fetch) -> Version:
        assert self.disk is not None
        opened = partial(_downloaded, self.disk, key, name, None if self._offline else fetch)
        return Version(name, key, opened, is_remote=True)


@contextmanager
def _downloaded(
    disk: AdapterDisk, key: str, name: str, fetch: Fetch | None
) -> Iterator[AdapterFiles]:
    with disk.open(key, name, fetch) as folder:
        yield found_in(folder, name)


def _local(folder: Path, name: str) -> Version | None:
    """The adapter of the operator's folder; None if there is none of this name."""
    try:
        found = find(folder, name)
    except AdapterNotFound:
        return None
    return Version(name, (found.files, found.stamps), lambda: nullcontext(found), is_remote=False)


def _nothing() -> None:
    pass


def retrieved(task: asyncio.Task[Any]) -> None:
    """A callback of a task that requests wait for: all of them may have ended before it failed."""
    if not task.cancelled():
        task.exception()
