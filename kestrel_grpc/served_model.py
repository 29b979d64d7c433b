"""ServedModel: the one model of this server, and its state as callers see it.

This module uses neither protobuf nor gRPC. A server has one ServedModel, which only the event loop uses. Its state
goes from LOADING to READY to DRAINING. READY becomes FAILED when the engine dies.
"""

from __future__ import annotations

import enum
import time

from kestrel_engine import InferenceEngine, ModelNotFoundError, RuntimeConfig

from .edge.calls.current_call import find_call
from .edge.failures.errors import ModelNotReady, ShuttingDown
from .security.identity.principal import ANONYMOUS, Scope


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class ServedModel:
    """Gives the services the engine, or raises the error that says why there is none."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._engine: InferenceEngine | None = None
        self._state = State.LOADING
        self._started_at = time.monotonic()

    @property
    def name(self) -> str:
        """The name that requests use for the model: the engine's, or the configured one while the engine loads."""
        if self._engine is not None:
            return self._engine.info.model
        return self.config.model if self.config.model_path is None else str(self.config.model_path)

    @property
    def state(self) -> State:
        if self._state is State.READY and self._engine is not None and not self._engine.is_ready:
            return State.FAILED
        return self._state

    @property
    def loaded(self) -> InferenceEngine | None:
        """The engine, also while it drains or has failed; None until it is loaded."""
        return self._engine

    def ready(self, engine: InferenceEngine) -> None:
        """Stores the warm engine and accepts requests from now on, unless the server drains already."""
        self._engine = engine
        if self._state is State.LOADING:
            self._state = State.READY

    def drain(self) -> None:
        """Refuses new requests from now on. Running requests continue."""
        self._state = State.DRAINING

    def check_room(self) -> None:
        """Raises EngineOverloaded if the queue has no room for a request of this caller.

        The call's message is not read yet, so the check assumes the highest priority that the caller may ask for.
        """
        if self._engine is not None and self.state is State.READY:
            call = find_call()
            caller = ANONYMOUS if call is None else call.principal
            best = "high" if Scope.HIGH in caller.scopes else "normal"
            self._engine.check_admission(caller.name, caller.weight, priority=best)

    def check_name(self, name: str | None, field: str = "model") -> None:
        """Raises ModelNotFoundError if ``name`` is not the served model. None means the default model."""
        if name is None or name == self.name:
            return
        if not 1 <= len(name) <= 512:
            limit = f"must have 1 to 512 characters; this server serves {self.name}"
            raise ModelNotFoundError(field, limit)
        raise ModelNotFoundError(field, f"{name!r} is not served; this server serves {self.name}")

    def engine(self, name: str | None = None) -> InferenceEngine:
        """The engine for a request for the model ``name``. Raises ModelNotReady, ShuttingDown, ModelNotFoundError."""
        state = self.state
        if state is State.DRAINING:
            raise ShuttingDown("the server is shutting down")
        if state is State.FAILED:
            raise ModelNotReady(f"{self.name} has failed; restart the server")
        if self._engine is None:
            seconds = time.monotonic() - self._started_at
            raise ModelNotReady(f"{self.name} is still loading ({seconds:.0f} s so far)")
        self.check_name(name)
        return self._engine
