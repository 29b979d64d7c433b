"""ServedModels: the models of this server, and the state of each as callers see it.

This module uses neither protobuf nor gRPC. A server has one ServedModels, which only the event loop uses. The state of
a model goes from LOADING to READY to DRAINING. READY becomes FAILED when the engine dies. One model's failure leaves
the others as they are.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from kestrel_engine import (
    ConfigError,
    EngineOverloaded,
    InferenceEngine,
    InvalidRequest,
    ModelNotFoundError,
    RuntimeConfig,
    clock,
    maintenance,
)

from .edge.failures.errors import ModelNotReady, ShuttingDown
from .security.identity.principal import Principal, Scope


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class ServedModel:
    """Gives the services the engine, or raises the error that says why there is none."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._configured = _configured_name(config)
        self._engine: InferenceEngine | None = None
        self._state = State.LOADING
        self._started_at = clock.now()
        self._step = ""

    def note_progress(self, done: int, total: int, step: str) -> None:
        """The engine's progress callback, which any thread calls: refusals report how far the startup is."""
        self._step = f"; {step}, {100 * done // total} %" if total else f"; {step}"

    @property
    def name(self) -> str:
        """The name that requests use for the model."""
        return self._configured if self._engine is None else self._engine.info.model

    @property
    def state(self) -> State:
        if self._state is State.READY and self._engine is not None and not self._engine.is_ready:
            return State.FAILED
        return self._state

    @property
    def loaded(self) -> InferenceEngine | None:
        """The engine, also while it drains or has failed; None until it is loaded."""
        return self._engine

    @property
    def ready_engine(self) -> InferenceEngine | None:
        """The engine if it takes requests now, otherwise None."""
        engine = self._engine
        is_ready = self._state is State.READY and engine is not None and engine.is_ready
        return engine if is_ready else None

    def ready(self, engine: InferenceEngine) -> None:
        """Stores the warm engine and accepts requests from now on, unless the server drains already."""
        self._engine = engine
        if self._state is State.LOADING:
            self._state = State.READY

    def drain(self) -> None:
        """Refuses new requests from now on. Running requests continue."""
        self._state = State.DRAINING

    @property
    def engine(self) -> InferenceEngine:
        """The engine for a request. Raises ModelNotReady, ShuttingDown."""
        if (engine := self.ready_engine) is not None:
            return engine
        state = self.state
        if state is State.DRAINING:
            raise ShuttingDown(f"{self.name} or its server is shutting down")
        if state is State.FAILED:
            raise ModelNotReady(
                f"{self.name} has failed; an administrator must unload and load it again, or restart the server"
            )
        seconds = clock.now() - self._started_at
        raise ModelNotReady(f"{self.name} is still loading ({seconds:.0f} s so far{self._step})")


def _configured_name(config: RuntimeConfig) -> str:
    """The name that the model will have, which is never the operator's path."""
    try:
        return maintenance.served_name(config)
    except ConfigError:  # Loading it fails, and says why.
        return config.model


class ServedModels:
    """Finds the model of a request. The first model is the default: it answers requests that name none, and the
    server's state is its state."""

    def __init__(self, *models: ServedModel) -> None:
        assert models, "a server has a model"
        self._models = list(models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    @property
    def default(self) -> ServedModel:
        return self._models[0]

    def add(self, model: ServedModel) -> None:
        self._models.append(model)

    def remove(self, model: ServedModel) -> None:
        """Removes a model that is not the default."""
        assert model is not self.default, "the default model stays"
        self._models.remove(model)

    def make_default(self, model: ServedModel) -> None:
        self._models.remove(model)
        self._models.insert(0, model)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all models, the default first."""
        return tuple(model.name for model in self._models)

    @property
    def state(self) -> State:
        return self.default.state

    @property
    def engines(self) -> list[InferenceEngine]:
        """The engines of all models that are loaded."""
        return [model.loaded for model in self._models if model.loaded is not None]

    @property
    def num_requests(self) -> int:
        """The requests of all models that have not ended."""
        return sum(engine.num_requests for engine in self.engines)

    def drain(self) -> None:
        for model in self._models:
            model.drain()

    def check_room(self, caller: Principal) -> None:
        """Raises EngineOverloaded if no model's queue has room for a request of ``caller``.

        The call's message is not read yet, so the check assumes the highest priority that the caller may ask for, and
        any model.
        """
        best = "high" if Scope.HIGH in caller.scopes else "normal"
        refusal: EngineOverloaded | None = None
        for model in self._models:
            if (engine := model.ready_engine) is None:
                continue
            try:
                engine.check_admission(caller.name, caller.weight, priority=best)
                return
            except EngineOverloaded as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def model(self, name: str | None, field: str = "model") -> ServedModel:
        """The model ``name``; None means the default. Raises ModelNotFoundError, and InvalidRequest if it is empty."""
        if name is None:
            return self.default
        for model in self._models:
            if model.name == name:
                return model
        served = f"this server serves {', '.join(self.names)}"
        if not name:
            raise InvalidRequest(field, f"is required; {served}")
        raise ModelNotFoundError(
            field, f"{name!r} is not served; {served}", value=name, known=self.names
        )

    def engine(self, name: str | None = None) -> InferenceEngine:
        """The engine for a request for the model ``name``. Raises ModelNotReady, ShuttingDown, ModelNotFoundError."""
        if name is None or name not in self.names:
            engine = self._models[0].engine  # While the server cannot answer, that is the reason.
            if name is None:
                return engine
        return self.model(name).engine
