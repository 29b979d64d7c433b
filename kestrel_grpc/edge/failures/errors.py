"""The server's own errors. statuses.py gives each its status. This module does not import gRPC."""

from __future__ import annotations

from collections.abc import Iterable

import kestrel_engine as engine


class ModelNotReady(engine.KestrelError):
    """The model is still loading, or could not be loaded."""


class ShuttingDown(ModelNotReady):
    """The server refuses new requests because it is stopping."""


class SkillNotFound(engine.RequestError):
    """The request names a skill that the model does not have."""


class UploadsFull(engine.EngineOverloaded):
    """Unfinished uploads have reached their memory limit."""


class SlowReader(engine.KestrelError):
    """The client took too long to read its stream."""


class SlowSender(engine.KestrelError):
    """The client took too long to send a message."""


class UnsupportedBody(engine.KestrelError):
    """The header Content-Type of an HTTP request does not name one of ``types``, which its path takes."""

    def __init__(self, message: str, types: Iterable[bytes]) -> None:
        super().__init__(message)
        self.types = tuple(each for each in types if each)


class NoMessage(engine.KestrelError):
    """The call ended without a request message."""


class MethodNotFound(engine.KestrelError):
    """No service of this server has the method."""


class NotServed(engine.KestrelError):
    """The protocol has the method or the option, but this server has nothing that it could apply to."""


class CaptureError(engine.KestrelError):
    """The server cannot capture requests as requested."""


class AuditUnavailable(engine.KestrelError):
    """The server cannot record administrative calls, and refuses them."""


class ModelUnavailable(engine.KestrelError):
    """The server cannot load, unload or change models as requested."""


class ImageNotFound(engine.RequestError):
    """No stored image of this owner has the id."""


class StoredNotFound(engine.RequestError):
    """This caller has no file or batch with the id."""


class BatchesNotTaken(engine.KestrelError):
    """The server is configured to take no batches."""


class ImagesFull(engine.EngineOverloaded):
    """The image is larger than the owner's share, and the other owners use their shares."""


class ImagesNotKept(engine.KestrelError):
    """The server is configured to store no images."""
