"""The errors that the engine raises on purpose.

Code decides by the type of an error, never by its text. An ``assert`` checks conditions that only a mistake in the code
can break.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FieldPath = tuple[str | int, ...]
"""Where a value is in a request: names of fields and numbers of list items, from the outside in. Empty: the request."""


def path_text(path: FieldPath) -> str:
    """``("images", 1, "region")`` as "images[1].region"."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


class KestrelError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(KestrelError, ValueError):
    """A configuration field is invalid.

    Attributes: ``field`` (its name), ``value`` (as given), ``limit`` (the allowed values, in words).
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field}={value!r}: {limit}")
        self.field, self.value, self.limit = field, value, limit


class RequestError(KestrelError, ValueError):
    """The request can't be served as given. ``path`` is that of the invalid part, and ``field`` its text. ``message``
    describes the problem.

    For programs, where they are known: ``value``, what the request has; ``limit``, what it may have at most; ``known``,
    the names that it may have instead. ``most_tokens``: the largest max_tokens with which the request could be served,
    if only that is too large.
    """

    most_tokens: int | None = None

    def __init__(
        self,
        field: str | FieldPath,
        message: str,
        *,
        value: str | float | None = None,
        limit: float | None = None,
        known: tuple[str, ...] = (),
    ) -> None:
        """``field``: a path, or the name of a field of the request; "" for the request."""
        super().__init__(message)
        self.path: FieldPath = field if isinstance(field, tuple) else (field,) if field else ()
        self.message = message
        self.value, self.limit, self.known = value, limit, known

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"

    @property
    def field(self) -> str:
        return path_text(self.path)

    def at(self, path: FieldPath) -> RequestError:
        """The same error in another field."""
        moved: RequestError = type(self).__new__(type(self), *self.args)
        moved.__dict__.update(self.__dict__, path=path)
        return moved


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range."""


class AdapterUnfit(InvalidRequest):
    """The adapter that the request names does not fit the served model, or its files can't be read."""


class AdapterNotFound(RequestError):
    """There is no adapter of the name that the request gives."""


class AdapterRefused(RequestError):
    """The server may not fetch the adapter: its settings do not name the repository, or its key gives no access."""

    def __init__(self, message: str) -> None:
        super().__init__("adapter", message)


class ContextLengthError(RequestError):
    """Prompt and requested tokens exceed the model's context."""


class ImageError(RequestError):
    """Base of the image errors."""


class ImageDecodeError(ImageError):
    """The image is broken, truncated or empty."""


class UnsupportedImageError(ImageError):
    """The image's format is not on the allow-list."""


class ImageTooLargeError(ImageError):
    """The image exceeds a limit on bytes, pixels or aspect ratio."""


class ImageTooSlowError(ImageError):
    """Decoding the image took longer than the limit."""


class ModelNotFoundError(RequestError):
    """The request names a model that this engine does not serve."""


class SkillUnavailable(RequestError):
    """The model can't do this skill (such as segment on Moondream 2), or no skill with this name is registered."""


class ModelLoadError(KestrelError):
    """Base of the errors that keep a model from becoming ready."""


class CheckpointError(ModelLoadError):
    """The checkpoint does not hold exactly the tensors that the architecture needs.

    One error reports all findings: ``missing``, ``unexpected``, ``misshaped`` and ``nonfinite`` list tensor names.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        misshaped: Sequence[str] = (),
        nonfinite: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.missing, self.unexpected = tuple(missing), tuple(unexpected)
        self.misshaped, self.nonfinite = tuple(misshaped), tuple(nonfinite)


class DownloadError(ModelLoadError):
    """A model could not be fetched from the hub."""


class InsufficientMemoryError(ModelLoadError):
    """The weights and the KV cache don't fit into the available memory."""


@dataclass(frozen=True, slots=True)
class Quota:
    """A principal's use of a shared resource. ``held``: what the principal holds now. ``share``: what it may hold while
    other principals want some. ``what`` names the resource."""

    principal: str
    what: str
    held: int
    share: int

    @property
    def holder(self) -> str:
        """The principal, as messages name it."""
        return self.principal or "callers without credentials"


class EngineOverloaded(KestrelError):
    """A bounded queue is full. ``retry_after_s``: when to try again, a hint in seconds. ``quota``: the caller's share,
    if the caller exceeds it."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, quota: Quota | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_s, self.quota = retry_after_s, quota


class AdaptersFull(EngineOverloaded):
    """The adapters that requests use leave no memory for another one, or too many adapters wait to be loaded."""


class AdapterUnavailable(KestrelError):
    """The adapter can't be fetched now: the hub or the tuning API does not answer, the transfer broke off, or its
    files change while they are read."""


class ConstraintsCostly(EngineOverloaded):
    """The request's constraint is slow to follow, and slow constraints of its principal used too much processor time
    lately."""


class Displaced(EngineOverloaded):
    """The request waited and lost its place to a request with a stronger claim. Nothing was computed for it."""


class PixelsWaiting(EngineOverloaded):
    """With this image, the pixels that wait to be decoded would exceed the limit."""


class QueueTimeout(EngineOverloaded):
    """The request waited longer than max_queue_wait_s. Nothing was computed for it."""


class DeadlineExceeded(KestrelError):
    """The caller's deadline passed while the request waited. Nothing was computed for it."""


class EngineClosed(KestrelError):
    """The engine is shutting down or is shut down, and accepts no more requests."""


class ProfileError(KestrelError):
    """A profile can't be taken now, or its file could not be written."""


class RuntimeFailure(KestrelError):
    """A step failed on the device or in the engine's code. The request is lost; the engine continues.

    ``out_of_memory``: the step failed because the device had no memory left.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class SkillFault(RuntimeFailure):
    """A skill gave a rule or a prompt that the model can't follow. The message is for the author of the skill."""
