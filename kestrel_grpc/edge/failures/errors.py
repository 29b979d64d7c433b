"""The server's own errors. statuses.py gives each its status. This module does not import gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import kestrel_engine as engine
from kestrel_engine import FieldPath


@contextmanager
def located(place: Callable[[FieldPath], FieldPath]) -> Iterator[None]:
    """Raises a RequestError of the block with the path that ``place`` returns for its own: the engine names its
    arguments, and a reader of a message the fields of this message."""
    try:
        yield
    except engine.RequestError as error:
        raise error.at(place(error.path)) from error


@contextmanager
def inside(*outer: str | int) -> Iterator[None]:
    """As ``located``, for fields of what ``outer`` is the path of."""
    with located(lambda path: (*outer, *path)):
        yield


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
    """The header Content-Type of an HTTP request does not name a type that its path takes."""


class NoMessage(engine.KestrelError):
    """The call ended without a request message."""


class MethodNotFound(engine.KestrelError):
    """No service of this server has the method."""


class NotServed(engine.KestrelError):
    """The protocol has the method or the option, but this server has nothing that it could apply to."""


class CaptureError(engine.KestrelError):
    """The server cannot capture requests as requested."""


class ModelUnavailable(engine.KestrelError):
    """The server cannot load, unload or change models as requested."""


class ImageNotFound(engine.RequestError):
    """No stored image of this owner has the id."""


class ImagesFull(engine.EngineOverloaded):
    """The image is larger than the owner's share, and the other owners use their shares."""


class ImagesNotKept(engine.KestrelError):
    """The server is configured to store no images."""
