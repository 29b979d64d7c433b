"""SharedImagesConfig: the store that several servers share for images by id, and its limits. The default is none."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from kestrel_engine import ConfigError, SettingGroup, check_settings, checked, read_small_file

SHARED_IMAGES = SettingGroup("shared images", "shared-images")
PASSWORD_VARIABLE = "KESTREL_SHARED_IMAGES_PASSWORD"
MIB = 1024 * 1024
_MONTH_S = 30 * 86_400.0
_SCHEMES = ("redis", "rediss")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedImagesConfig:
    """Raises ConfigError. Its messages never show a password."""

    url: str | None = SHARED_IMAGES.setting(
        None,
        "store that several servers share for images that clients put, so that each of them knows the ids: "
        "redis://HOST:PORT/DATABASE or rediss://… (TLS); needs the extra redis",
        flag="--shared-images",
        metavar="URL",
        shown="none: each server has its own images",
    )
    ttl_s: float = SHARED_IMAGES.setting(
        3600.0,
        "how long an image stays in the shared store after it was put last",
        flag="--shared-images-ttl",
        low=1,
        high=_MONTH_S,
    )
    timeout_s: float = checked(2.0, low=0.01, high=60)
    """How long a call waits for the shared store."""
    value_bytes: int = checked(33 * MIB, low=1, high=512 * MIB)
    """Largest image in the shared store; the server neither writes nor reads a larger one."""
    caller_bytes: int = checked(256 * MIB, low=1)
    """Bytes of one caller's images in the shared store; its oldest are dropped first."""
    flight_bytes: int = checked(128 * MIB, low=1)
    """Bytes that are on the way to or from the shared store at one time; one caller may have half of them."""
    key_file: str | None = SHARED_IMAGES.setting(
        None,
        "encrypt images in the shared store (AES-GCM) with the first key of this file; the others decrypt only; each "
        "line: ID and 32 bytes in base64",
        flag="--shared-images-key-file",
        metavar="FILE",
        shown="no encryption",
    )
    password_file: str | None = SHARED_IMAGES.setting(
        None,
        "file with the password of Redis; it is read at every connection",
        flag="--shared-images-password-file",
        metavar="FILE",
        shown=f"{PASSWORD_VARIABLE}, or no password",
    )
    ca_file: str | None = SHARED_IMAGES.setting(
        None,
        "authorities that the certificate of Redis must come from (PEM), for rediss://",
        flag="--shared-images-ca",
        metavar="FILE",
        shown="the system's",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.url is None:
            return
        try:
            _check(self.url)
        except ValueError as error:
            raise ConfigError("url", _shown(self.url), str(error)) from None
        if self.flight_bytes < self.value_bytes:
            raise ConfigError(
                "flight_bytes",
                self.flight_bytes,
                f"must be at least value_bytes ({self.value_bytes})",
            )

    def password(self) -> str | None:
        """The password of Redis. Raises OSError and UnicodeDecodeError if the file can't be read."""
        if self.password_file is None:
            return os.environ.get(PASSWORD_VARIABLE) or None
        return read_small_file(self.password_file, 4096).decode().rstrip("\r\n") or None


def _check(url: str) -> None:
    """Raises ValueError, whose message holds nothing of the address."""
    parts = _split(url)
    if parts.password is not None:
        raise ValueError(
            f"must hold no password, which others could read; set {PASSWORD_VARIABLE} or "
            "--shared-images-password-file"
        )
    if parts.query or parts.fragment:
        raise ValueError("must have neither ? nor #")
    if parts.scheme not in _SCHEMES:
        raise ValueError("must begin with redis:// or rediss://")
    if not parts.hostname:
        raise ValueError("must name a host: redis://HOST:PORT/DATABASE")
    if not re.fullmatch(r"(/\d{0,4})?", parts.path):
        raise ValueError("must end with the number of a database, such as /0, or without")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # Its message may hold what follows a colon, and so a password.
        raise ValueError("must be like redis://HOST:PORT/DATABASE") from None
    return parts


def _shown(url: str) -> str:
    """What an error may show: neither user nor password."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return "(hidden)" if "@" in url else url
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:
        host = ""
    return f"{scheme}://{host}…"
