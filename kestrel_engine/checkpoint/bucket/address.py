"""BucketAddress: where a model is in a bucket, ``s3://BUCKET/PREFIX``. This module uses no network."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import ConfigError

SCHEME = "s3://"
_ADDRESS = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[\w=+-][\w.=+-]{0,199}){0,10})/?"
)


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """``prefix``: without slashes at its ends; may be empty."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.prefix.rpartition("/")[2] or self.bucket


def is_address(text: object) -> bool:
    return isinstance(text, str) and text.startswith(SCHEME)


def parse_address(field: str, text: str) -> BucketAddress:
    """Raises ConfigError, which names ``field``."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise ConfigError(
            field,
            text if "@" not in text else f"{SCHEME}…",
            "must be s3://BUCKET/PREFIX, with a prefix of letters, digits and . _ = + - between slashes; keys come "
            "from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or the machine's role",
        )
    return BucketAddress(match["bucket"], match["prefix"].strip("/"))
