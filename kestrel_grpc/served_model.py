"""ServedModel: the one model of this server and whether it can answer. Owns the engine's life as callers see it.

Knows no protobuf and no gRPC. One object, on the event loop; it goes LOADING → READY → DRAINING, or to FAILED.
"""

from __future__ import annotations

import enum
import time

from kestrel_engine import InferenceEngine, ModelNotFoundError, RuntimeConfig

from .edge.current_call import find_call
from .edge.errors import ModelNotReady, ShuttingDown
from .security.identity.principal import ANONYMOUS, Scope


class State(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class ServedModel:
    """Hands out the engine to those who may use it."""

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self._engine: InferenceEngine | None = None
        self._state = State.LOADING
        self._started_at = time.monotonic()

    @property
    def name(self) -> str:
        """The name by which requests may ask for it: the engine's once there is one, else as configured."""
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
        """The engine, whether it takes requests or not; None while it loads."""
        return self._engine

    def ready(self, engine: InferenceEngine) -> None:
        """The engine is warm: requests may come."""
        self._engine = engine
        if self._state is State.LOADING:
            self._state = State.READY

    def drain(self) -> None:
        """From now on requests are refused; those that run may end."""
        self._state = State.DRAINING

    def check_room(self) -> None:
        """Raises EngineOverloaded if no request of the caller would find room. The message is not read yet, so the best
        priority counts that the caller may ask for."""
        if self._engine is not None and self.state is State.READY:
            call = find_call()
            caller = ANONYMOUS if call is None else call.principal
            best = "high" if Scope.HIGH in caller.scopes else "normal"
            self._engine.check_admission(caller.name, caller.weight, priority=best)

    def check_name(self, name: str | None, field: str = "model") -> None:
        """Raises ModelNotFoundError, naming what is served; None means the default."""
        if name is None or name == self.name:
            return
        if not 1 <= len(name) <= 512:
            raise ModelNotFoundError(field, f"must have 1 to 512 characters; served is {self.name}")
        raise ModelNotFoundError(field, f"{name!r} is not served; served is {self.name}")

    def engine(self, name: str | None = None) -> InferenceEngine:
        """The engine for a request that asks for ``name``. Raises ModelNotReady, ShuttingDown, ModelNotFoundError."""
        state = self.state
        if state is State.DRAINING:
            raise ShuttingDown("the server is shutting down")
        if state is State.FAILED:
            raise ModelNotReady(f"{self.name} has failed; the server must be restarted")
        if self._engine is None:
            seconds = time.monotonic() - self._started_at
            raise ModelNotReady(f"{self.name} is still loading, for {seconds:.0f} s so far")
        self.check_name(name)
        return self._engine
