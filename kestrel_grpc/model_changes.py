"""ModelChanges: loads and unloads models while the server runs, and changes the default. Owns the load in progress."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from kestrel_engine import ConfigError, InferenceEngine, Observer, RuntimeConfig, clock, maintenance

from .edge.failures.errors import ModelUnavailable
from .logs.records import log_lifecycle
from .served_model import ServedModel, ServedModels, State
from .settings.model import MOST_MODELS, other_model
from .telemetry.opening import ModelObserver, Telemetry

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int, str], None]
LoadModel: TypeAlias = Callable[
    [RuntimeConfig, Observer | None, Progress | None], Awaitable[InferenceEngine]
]
"""Loads a model, with the observer of its requests and a callback that any thread calls with the progress."""

_MOST_EVENTS = 64
"""Reports of progress that wait for a slow reader. Further ones are dropped."""


class Loading(NamedTuple):
    """A report of progress: what is done of the whole (0: not known) of a step."""

    done: int
    total: int
    step: str


class LoadedModel(NamedTuple):
    """The end of a load."""

    name: str
    device: str
    seconds: float


class ModelChanges:
    """``load``: None for a worker, which loads no others. ``changed``: called when a model comes, goes or becomes
    the default."""

    def __init__(
        self,
        served: ServedModels,
        load: LoadModel | None,
        changed: Callable[[], None],
        folders: Sequence[str] = (),
        telemetry: Callable[[], Telemetry | None] = lambda: None,
    ) -> None:
        """``folders``: those from which models are loaded by path (ServerConfig.model_folders). ``telemetry``: returns
        the server's, which opens after this object is made."""
        self._served, self._load, self._changed = served, load, changed
        self._folders = folders
        configs = [model.config for model in served]
        places = (place for c in configs for place in (c.model, c.model_path, c.tokenizer_path))
        self._named = frozenset(str(place) for place in places if place is not None)
        """The models and files that were named at the start."""
        self._telemetry = telemetry
        self._task: asyncio.Task[LoadedModel] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """The models that are being unloaded. Their engines are the server's to shut down, too."""

    async def load_configured(self) -> None:
        """Loads the models that follow the default one at the start of the server. Raises ConfigError, ModelLoadError,
        and what loading raises."""
        for model in list(self._served)[1:]:
            await self._fill(model, None)

    def load(
        self, source: str, settings: Mapping[str, str], *, make_default: bool
    ) -> AsyncIterator[Loading | LoadedModel]:
        """Loads a model (`other_model`) and reports the progress, then the end. Loading continues if the reader leaves.

        Raises InvalidRequest and ModelUnavailable at once or while it loads.
        """
        config = other_model(
            self._served.default.config, source, settings, self._folders, self._named
        )
        if self._load is None:
            raise ModelUnavailable(
                "a server of several workers has one model and loads no others; start a server without --workers for "
                f"{source[:200]}"
            )
        if self._task is not None and not self._task.done():
            raise ModelUnavailable("another model is being loaded; try again when it is loaded")
        if len(list(self._served)) >= MOST_MODELS:
            raise ModelUnavailable(f"the server has {MOST_MODELS} models; unload one first")
        if (name := maintenance.served_name(config)) in self._served.names:
            raise ModelUnavailable(f"{name} is served already")
        events: _Events = asyncio.Queue(_MOST_EVENTS)
        loop = asyncio.get_running_loop()

        def note(event: Loading) -> None:
            if not events.full():
                events.put_nowait(event)

        def progress(done: int, total: int, step: str) -> None:
            loop.call_soon_threadsafe(note, Loading(done, total, step))

        self._task = asyncio.create_task(self._load_one(config, progress, make_default))
        self._task.add_done_callback(partial(_put_end, events))
        return _reported(events)

    def unload(self, name: str, grace_s: float) -> Awaitable[None]:
        """Ends a model: refuses its new requests, gives running ones ``grace_s`` seconds, and frees its memory. Goes
        on if the caller leaves. Raises ModelNotFoundError and ModelUnavailable at once."""
        model = self._served.model(name)
        if model is self._served.default:
            raise ModelUnavailable(f"{name} is the default model; make another one the default")
        if model.state is State.DRAINING:
            raise ModelUnavailable(f"{name} is being unloaded")
        if model.state is State.LOADING:
            raise ModelUnavailable(f"{name} is being loaded; unload it when it is ready")
        model.drain()
        self._changed()
        ending = asyncio.create_task(self._end(model, grace_s))
        del model
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return asyncio.shield(ending)

    def make_default(self, name: str) -> str:
        """Returns the previous default. Raises ModelNotFoundError, ModelUnavailable."""
        model = self._served.model(name)
        if model.state is not State.READY:
            raise ModelUnavailable(f"{name} is not ready")
        before = self._served.default.name
        self._served.make_default(model)
        self._changed()
        return before

    async def close(self) -> None:
        """Abandons a load in progress. Its thread ends by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _end(self, model: ServedModel, grace_s: float) -> None:
        name, engine = model.name, model.loaded
        if engine is not None:
            await engine.shutdown(grace_s=grace_s)
        telemetry = self._telemetry()
        if telemetry is not None:
            telemetry.remove_model(name)
        self._served.remove(model)
        self._changed()
        held = None if engine is None else weakref.ref(engine)
        del model, engine
        await asyncio.to_thread(_free_memory, held)
        log_lifecycle("unloaded", model=name)

    async def _load_one(
        self, config: RuntimeConfig, progress: Progress, make_default: bool
    ) -> LoadedModel:
        """Loads a further model, which is listed meanwhile. Raises ModelUnavailable."""
        model = ServedModel(config)
        self._served.add(model)

        def note(done: int, total: int, step: str) -> None:
            model.note_progress(done, total, step)
            progress(done, total, step)

        try:
            loaded = await self._fill(model, note)
        except BaseException as error:
            self._served.remove(model)
            if not isinstance(error, Exception):
                raise
            log_lifecycle("failed", model=config.model, error=str(error))
            raise ModelUnavailable(f"{config.model} could not be loaded: {error}") from error
        if make_default:
            self.make_default(loaded.name)
        return loaded

    async def _fill(self, model: ServedModel, progress: Progress | None) -> LoadedModel:
        """Loads the engine of a listed model."""
        assert self._load is not None, "checked by the caller"
        self._check_distinct(model, model.name)
        began = clock.now()
        telemetry = self._telemetry()
        observer = None if telemetry is None else ModelObserver(telemetry)
        engine = await self._load(model.config, observer, progress)
        info = engine.info
        try:
            self._check_distinct(model, info.model)
            if self._served.default.state is State.DRAINING:
                raise ModelUnavailable("the server is shutting down")
        except BaseException:
            await engine.shutdown()
            raise
        if observer is not None:
            observer.ready(engine, clock.now() - began)
        model.ready(engine)
        self._changed()
        seconds = round(clock.now() - began, 3)
        log_lifecycle("loaded", model=info.model, device=info.device, load_s=seconds)
        return LoadedModel(info.model, info.device, seconds)

    def _check_distinct(self, model: ServedModel, name: str) -> None:
        """Raises ConfigError if another model has the name of ``model``."""
        if name in (each.name for each in self._served if each is not model):
            limit = "two models of this server have this name; rename the file or folder of one"
            raise ConfigError("model", name, limit)


_Events: TypeAlias = asyncio.Queue[Loading | asyncio.Task[LoadedModel]]
"""Reports of a load, and at last its task, which has ended."""


async def _reported(events: _Events) -> AsyncIterator[Loading | LoadedModel]:
    """Yields the reports, then the task's result. Raises its error."""
    while isinstance(event := await events.get(), Loading):
        yield event
    yield await event


def _put_end(events: _Events, task: asyncio.Task[LoadedModel]) -> None:
    """Puts the ended task. Its error is logged by itself, if the caller has left."""
    if not task.cancelled():
        task.exception()
    if events.full():
        events.get_nowait()
    events.put_nowait(task)


_PAUSES_S = (0.05, 0.2, 0.5)


def _free_memory(held: weakref.ref[InferenceEngine] | None) -> None:
    """Frees the memory of a model that was unloaded. ``held``: its engine.

    Objects of the start were frozen (process/serving.py), and what is left is frozen again. A call that is about to end
    may hold the engine for a moment. A frozen engine would never be freed. So nothing is frozen then, and a later
    collection frees it. A collection holds the interpreter for some tenths of a second.
    """
    gc.unfreeze()
    gc.collect()
    for pause_s in _PAUSES_S:
        if held is None or held() is None:
            break
        clock.sleep(pause_s)
        gc.collect()
    if held is None or held() is None:
        gc.freeze()
    torch = sys.modules.get("torch")  # Without it, no model was on a GPU.
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
