"""AdapterLibrary: which adapters are loaded, and how many requests use each.

Used on the event loop. A thread reads the files, one adapter at a time. The least recently used adapter makes room for
another one, unless a request uses it. If files change, later requests get another adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from ..byte_cache import ByteCache
from ..checkpoint.weights.expected import Shapes
from ..errors import AdaptersFull, AdapterUnavailable, AdapterUnfit, EngineClosed
from ..types.adapter import Adapter, AdapterCounts
from ..types.model_config import ModelConfig
from .files import AdapterFiles, CheckedAdapter, Packer, check, have_changed, read
from .origins.origins import Origins, Version, retrieved
from .targets import targets

if TYPE_CHECKING:
    import torch

Upload = Callable[[Adapter], Adapter]

logger = logging.getLogger(__name__)

MAX_LOADING = 32
"""Adapters that may wait to be loaded."""
_MOST_TRIED = 5
"""Readings of an adapter whose files change while they are read."""
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """The use of an adapter by one request. ``give_back`` must be called once, when the request has ended."""

    adapter: Adapter
    give_back: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Entry:
    version: Version
    loading: asyncio.Task[Adapter] = field(init=False)
    num_bytes: int = 0
    """Memory that is reserved for it."""
    users: int = 0
    """Requests that use it or wait for it."""


class AdapterLibrary:
    """All loaded adapters take at most ``max_bytes``. ``packer``: for kernels that read adapters in another form.
    ``upload``: copies an adapter to the device; None where the device is the host. The host keeps copies of at most
    ``host_bytes``."""

    def __init__(
        self,
        origins: Origins,
        model: ModelConfig,
        *,
        dtype: torch.dtype,
        max_bytes: int,
        host_bytes: int = 0,
        packer: Packer | None = None,
        upload: Upload | None = None,
    ) -> None:
        self.origins, self._model = origins, model
        self._shapes = targets(model)
        self._dtype, self._packer = dtype, packer
        self._max_bytes = max_bytes
        self._host: ByteCache[Hashable, Adapter] = ByteCache(host_bytes)
        self._upload = upload
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        """By name, the most recently used last."""
        self.num_bytes = 0
        """Of all entries, and of those that requests still use although their files have changed."""
        self._num_loads = self._num_failures = 0
        self._size_bytes = _usual_bytes(self._shapes, dtype.itemsize)
        """Of the largest adapter so far, or of a usual one."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kestrel-adapters")

    @property
    def counts(self) -> AdapterCounts:
        """What is loaded and used, now. From any thread."""
        entries = self._entries.copy()
        loading = [name for name, entry in entries.items() if not entry.loading.done()]
        return AdapterCounts(
            loaded=tuple(name for name in reversed(entries) if name not in loading),
            loading=tuple(loading),
            used=sum(entry.users > 0 and entry.loading.done() for entry in entries.values()),
            most=self._max_bytes // self._size_bytes,
            num_bytes=self.num_bytes,
            host_bytes=self._host.num_bytes,
            loads=self._num_loads,
            failures=self._num_failures,
        )

    async def acquire(self, name: str) -> Lease:
        """Returns the adapter, loaded. Raises AdapterNotFound, AdapterRefused, AdapterUnfit, AdapterUnavailable, and
        AdaptersFull if adapters in use leave no memory for it or too many wait to be loaded."""
        version = await self.origins.find(name)
        entry = self._entries.get(name)
        if entry is None or entry.version.token != version.token:
            entry = self._begin(version)
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

    async def known(self) -> dict[str, int]:
        """The bytes of each adapter of the folder and of each loaded one, by name in order; 0 if it is not loaded."""
        names = dict.fromkeys(await self.origins.local_names(), 0)
        names |= {
            name: entry.num_bytes for name, entry in self._entries.items() if entry.loading.done()
        }
        return dict(sorted(names.items()))

    def drop(self, name: str) -> bool:
        """Drops the adapter ``name``; requests that use it or wait for it keep it. Returns whether it was loaded."""
        entry = self._entries.get(name)
        if entry is None or not entry.loading.done():
            return False
        self._drop(entry)
        return True

    async def close(self) -> None:
        """Ends loading, after the adapter that is being read. Requests that wait for an adapter get EngineClosed."""
        for entry in self._entries.values():
            entry.loading.cancel()
        await self.origins.close()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _begin(self, version: Version) -> _Entry:
        """Begins to load an adapter. It replaces the one of the same name."""
        if sum(not each.loading.done() for each in self._entries.values()) >= MAX_LOADING:
            raise AdaptersFull(f"{MAX_LOADING} adapters wait to be loaded")
        if version.name in self._entries:
            self._drop(self._entries[version.name])
        self._entries[version.name] = entry = _Entry(version)
        entry.loading = asyncio.create_task(self._load(entry))
        entry.loading.add_done_callback(retrieved)
        return entry

    async def _load(self, entry: _Entry) -> Adapter:
        loop, name = asyncio.get_running_loop(), entry.version.name
        try:
            host = self._host.find(entry.version.token)
            if host is None:
                host = await self._read(entry)
            else:
                self._reserve(entry, host.num_bytes)
            adapter = host
            if self._upload is not None:
                adapter = await loop.run_in_executor(self._thread, self._upload, host)
                self._host.keep(entry.version.token, host, host.num_bytes)
        except BaseException as error:
            self._drop(entry)
            if isinstance(error, Exception):
                self._num_failures += 1
                self.origins.note_failure(entry.version, error)
            raise
        if self._entries.get(name) is not entry:
            self._free(entry)
        if not self._num_loads or adapter.num_bytes > self._size_bytes:
            self._size_bytes = max(1, adapter.num_bytes)
        self._num_loads += 1
        logger.info("adapter %s: %.1f MB", name, adapter.num_bytes / 1e6)
        return adapter

    async def _read(self, entry: _Entry) -> Adapter:
        """The adapter on the host. Reserves its device memory. Reads the new files if the operator replaces them."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_TRIED):
            found, give_back = await self.origins.opened(entry.version)
            try:
                return await self._read_files(entry, found)
            except AdapterUnfit:
                if not await loop.run_in_executor(self._thread, have_changed, found):
                    raise
            finally:
                give_back()
            self.num_bytes -= entry.num_bytes
            entry.num_bytes = 0
            await asyncio.sleep(_PAUSE_S)
            entry.version = await self.origins.find(entry.version.name)
        raise AdapterUnavailable(
            f"the files of {entry.version.name!r} change while they are read; try again later"
        )

    async def _read_files(self, entry: _Entry, found: AdapterFiles) -> Adapter:
        loop = asyncio.get_running_loop()
        checked = await loop.run_in_executor(
            self._thread, check, found, self._shapes, self._model.text
        )
        self._reserve(entry, self._size(checked))
        return await loop.run_in_executor(self._thread, read, checked, self._dtype, self._packer)

    def _size(self, checked: CheckedAdapter) -> int:
        """The bytes of an adapter on the device. Raises AdapterUnfit if the kernels can't compute it."""
        if self._packer is None:
            return checked.count * self._dtype.itemsize
        refusal = self._packer.refusal(checked.ranks)
        if refusal is not None:
            name = checked.found.name
            raise AdapterUnfit("adapter", f"{name!r} can't be applied: it {refusal}")
        return self._packer.num_bytes(checked.ranks)

    def _reserve(self, entry: _Entry, wanted: int) -> None:
        name = entry.version.name
        if wanted > self._max_bytes:
            raise AdapterUnfit(
                "adapter",
                f"{name!r} takes {wanted} bytes; the limit of all loaded adapters is {self._max_bytes}",
                value=wanted,
                limit=self._max_bytes,
            )
        unused = [each for each in self._entries.values() if not each.users and each.loading.done()]
        in_use = self.num_bytes - sum(each.num_bytes for each in unused)
        if in_use + wanted > self._max_bytes:
            raise AdaptersFull(
                f"adapters in use take {in_use} of {self._max_bytes} bytes; {name!r} takes {wanted} more; try again "
                "later"
            )
        for other in unused:
            if self.num_bytes + wanted <= self._max_bytes:
                break
            self._drop(other)
        entry.num_bytes = wanted
        self.num_bytes += wanted

    def _give_back(self, entry: _Entry) -> None:
        entry.users -= 1
        if self._entries.get(entry.version.name) is not entry:
            self._free(entry)

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.version.name) is entry:
            del self._entries[entry.version.name]
        self._free(entry)

    def _free(self, entry: _Entry) -> None:
        """Gives the memory of a removed entry back, unless requests use it."""
        if not entry.users:
            self.num_bytes -= entry.num_bytes
            entry.num_bytes = 0


def _usual_bytes(shapes: Shapes, itemsize: int) -> int:
    """The bytes of an adapter of rank 16 on all MLPs of the text decoder; of experts, rank 2."""
    total = 0
    for module, (*experts, rows, columns) in shapes.items():
        if module.startswith("text.") and ".mlp." in module:
            total += prod(experts) * (2 if experts else 16) * (rows + columns) * itemsize
    return max(1, total)
