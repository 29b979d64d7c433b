"""The server's own errors. Each has its status in statuses.py. Imports nothing of gRPC."""

from __future__ import annotations

import kestrel_engine as engine


class ModelNotReady(engine.KestrelError):
    """The model is still loading, or could not be loaded."""


class ShuttingDown(ModelNotReady):
    """The server takes no more requests."""


class SkillNotFound(engine.RequestError):
    """The request names a skill that the model doesn't have."""


class UploadsFull(engine.EngineOverloaded):
    """Unfinished uploads hold as much memory as they may."""


class SlowReader(engine.KestrelError):
    """The caller took too long to read what its stream was sent."""


class SlowSender(engine.KestrelError):
    """The caller took too long to send a message that was asked for."""


class NoMessage(engine.KestrelError):
    """The call ended without the message that its method takes."""


class MethodNotFound(engine.KestrelError):
    """No service here has the method."""


class CaptureError(engine.KestrelError):
    """Requests can't be captured as asked."""


class LocatedError(Exception):
    """``error``, whose field has ``path`` in the request, where the engine's own name of it doesn't tell."""

    def __init__(self, error: engine.RequestError, path: str) -> None:
        super().__init__(f"{path}: {error.message}")
        self.error, self.path = error, path


class ImageNotFound(engine.RequestError):
    """No picture of this owner has the id, or no longer."""


class ImagesFull(engine.EngineOverloaded):
    """The image is larger than the owner's share, and the other owners keep within theirs."""


class ImagesNotKept(engine.KestrelError):
    """The server was told to keep no pictures."""
