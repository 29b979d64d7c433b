"""AdapterLibrary: the adapters of a folder, and which of them are loaded.

Used on the event loop. Files are read in a thread of its own, one adapter at a time; requests for the same adapter wait
for one reading. Loaded adapters stay until their memory is needed for another one, the least recently used goes first.
An adapter that a request uses stays. Files that change give another adapter; requests that run keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AdaptersFull, AdapterUnfit, EngineClosed
from ..types.adapter import Adapter
from ..types.model_config import ModelConfig
from .files import Checked, Found, Packer, check, find, read
from .targets import targets

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_LOADING = 32
"""Adapters that may wait to be loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The use of an adapter by one request. ``give_back`` must be called once, when the request has ended."""

    adapter: Adapter
    give_back: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Entry:
    found: Found
    loading: asyncio.Task[Adapter] = field(init=False)
    num_bytes: int = 0
    """Memory that is reserved for it."""
    users: int = 0
    """Requests that use it or wait for it."""


class AdapterLibrary:
    """``acquire`` gives an adapter by its name. All loaded ones together take at most ``max_bytes``. ``packer``: for
    kernels that read adapters in another form."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
        packer: Packer | None = None,
    ) -> None:
        self._folder, self._model = folder, model
        self._shapes = targets(model)
        self._dtype, self._device, self._packer = dtype, device, packer
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """By name, the most recently used last."""
        self._num_bytes = 0
        """Of all entries, and of those that requests still use although their files have changed."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-adapters")

    async def acquire(self, name: str) -> Lease:
        """Returns the adapter, loaded.

        Raises AdapterNotFound, AdapterUnfit, and AdaptersFull if adapters in use leave no memory for it or too many
        wait to be loaded.
        """
        found = await asyncio.to_thread(find, self._folder, name)
        entry = self._entries.get(name)
        if entry is None or (entry.found.files, entry.found.stamps) != (found.files, found.stamps):
            entry = self._begin(found)
        self._entries.move_to_end(name)
        entry.users += 1
        try:
            # Shielded, because other requests may wait for the same adapter.
            adapter = await asyncio.shield(entry.loading)
        except asyncio.CancelledError:
            self._give_back(entry)
            if entry.loading.cancelled():
                raise EngineClosed("the engine was shut down") from None
            raise
        except BaseException:
            self._give_back(entry)
            raise
        return Lease(adapter, partial(self._give_back, entry))

    async def close(self) -> None:
        """Ends loading, after the adapter that is being read. Requests that wait for an adapter get EngineClosed."""
        for entry in self._entries.values():
            entry.loading.cancel()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _begin(self, found: Found) -> _Entry:
        """Begins to load an adapter. It replaces the one of the same name."""
        if sum(not each.loading.done() for each in self._entries.values()) >= MAX_LOADING:
            raise AdaptersFull(f"{MAX_LOADING} adapters wait to be loaded")
        if found.name in self._entries:
            self._drop(self._entries[found.name])
        self._entries[found.name] = entry = _Entry(found)
        entry.loading = asyncio.create_task(self._load(entry))
        entry.loading.add_done_callback(_retrieved)
        return entry

    async def _load(self, entry: _Entry) -> Adapter:
        loop, found = asyncio.get_running_loop(), entry.found
        try:
            checked = await loop.run_in_executor(
                self._thread, check, found, self._shapes, self._model.text
            )
            self._reserve(entry, checked)
            adapter = await loop.run_in_executor(
                self._thread, read, checked, self._dtype, self._device, self._packer
            )
        except BaseException:
            self._drop(entry)
            raise
        if self._entries.get(found.name) is not entry:
            self._free(entry)
        logger.info("adapter %s: %.1f MB", found.name, adapter.num_bytes / 1e6)
        return adapter

    def _reserve(self, entry: _Entry, checked: Checked) -> None:
        """Reserves the memory of an adapter. Drops unused ones if necessary."""
        wanted = checked.count * self._dtype.itemsize
        if self._packer is not None:
            refusal = self._packer.refusal(checked.ranks)
            if refusal is not None:
                raise AdapterUnfit(
                    "adapter", f"{entry.found.name!r} can't be applied: it {refusal}"
                )
            wanted = self._packer.num_bytes(checked.ranks)
        if wanted > self._max_bytes:
            raise AdapterUnfit(
                "adapter",
                f"{entry.found.name!r} takes {wanted} bytes; the limit of all loaded adapters is {self._max_bytes}",
            )
        for other in list(self._entries.values()):
            if self._num_bytes + wanted <= self._max_bytes:
                break
            if not other.users and other.loading.done():
                self._drop(other)
        if self._num_bytes + wanted > self._max_bytes:
            raise AdaptersFull(
                f"adapters in use take {self._num_bytes} of {self._max_bytes} bytes; {entry.found.name!r} takes "
                f"{wanted} more"
            )
        entry.num_bytes = wanted
        self._num_bytes += wanted

    def _give_back(self, entry: _Entry) -> None:
        entry.users -= 1
        if self._entries.get(entry.found.name) is not entry:
            self._free(entry)

    def _drop(self, entry: _Entry) -> None:
        """Removes an entry. Requests that use it keep it."""
        if self._entries.get(entry.found.name) is entry:
            del self._entries[entry.found.name]
        self._free(entry)

    def _free(self, entry: _Entry) -> None:
        """Gives the memory of a removed entry back, unless requests use it."""
        if not entry.users:
            self._num_bytes -= entry.num_bytes
            entry.num_bytes = 0


def _retrieved(task: asyncio.Task[Adapter]) -> None:
    """All requests for an adapter may have ended before its loading failed."""
    if not task.cancelled():
        task.exception()
