"""Records: an image as the bytes of a value in the shared store, and back.

A value begins with a header: the time at which it expires, and the id of the key that encrypts the rest, if one does.
The rest is encrypted with AES-GCM, or has its SHA-256 before it. Owner and image id take part in both, so that a value
that was moved to another owner or id is not accepted. A party that may write to a store without encryption can also
make valid values; encryption prevents that too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import struct
from pathlib import Path

import numpy as np

from kestrel_engine import ConfigError, clock

from ...settings.shared_images import SharedImagesConfig
from ..store import StoredImage

_MAGIC = b"KSI1"
_HEADER = struct.Struct(">4sQB")
"""Magic, milliseconds since 1970 at which the value expires, length of the key's id."""
_IMAGE = struct.Struct(">BIIIIB")
"""Kind, size of the upright image, height, width and channels of an array."""
_ENCODED, _PIXELS, _DELETED = 0, 1, 2
_NONCE_BYTES, _TAG_BYTES, _SUM_BYTES, _KEY_BYTES = 12, 16, 32, 32
_KEY_LINE = re.compile(r"(?P<id>[\w.-]{1,32})\s+(?P<key>[A-Za-z0-9+/=_-]{43,44})")
_MOST_KEYS = 16

OVERHEAD_BYTES = _HEADER.size + 32 + _NONCE_BYTES + max(_TAG_BYTES, _SUM_BYTES) + _IMAGE.size
"""The most bytes that a value has besides those of its image."""


class Unreadable(Exception):
    """The value is no image of this owner and id, is damaged, or needs a key that is not there. The message says which,
    without any of the value."""


class Deleted(Unreadable):
    """The value says that its owner has deleted the image."""


class Keys:
    """The keys of a file. The first one encrypts; all decrypt."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        # Imported here, because only servers that encrypt have the package.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self.first = next(iter(keys))

    @classmethod
    def read(cls, path: str) -> Keys:
        """Raises ConfigError, whose message shows no part of a key."""

        def refused(why: str) -> ConfigError:
            return ConfigError("shared_images_key_file", path, why)

        try:
            lines = Path(path).read_text("ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not ASCII"
            raise refused(f"can't be read: {reason}") from None
        keys: dict[str, bytes] = {}
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            match = _KEY_LINE.fullmatch(line)
            key = _decoded(match["key"]) if match else b""
            if match is None or len(key) != _KEY_BYTES:
                raise refused(f"line {number} must be an id and 32 bytes in base64")
            if match["id"] in keys:
                raise refused(f"line {number} repeats the id {match['id']}")
            keys[match["id"]] = key
        if not 1 <= len(keys) <= _MOST_KEYS:
            raise refused(f"holds {len(keys)} keys; there may be 1 to {_MOST_KEYS}")
        try:
            return cls(keys)
        except ImportError:
            raise refused(
                "needs the package cryptography: pip install ./clients/python '.[redis]'"
            ) from None

    def seal(self, data: bytes, context: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._ciphers[self.first].encrypt(nonce, data, context)

    def open(self, key_id: str, sealed: memoryview, context: bytes) -> bytes:
        """Raises Unreadable."""
        from cryptography.exceptions import InvalidTag

        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise Unreadable("it is encrypted with a key that this server does not have")
        try:
            return cipher.decrypt(bytes(sealed[:_NONCE_BYTES]), sealed[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise Unreadable("it is damaged, or of another caller") from None


class Records:
    """Packs and unpacks values. ``keys``: None without encryption."""

    def __init__(self, ttl_s: float, keys: Keys | None = None) -> None:
        self._ttl_s, self._keys = ttl_s, keys

    @classmethod
    def open(cls, config: SharedImagesConfig) -> Records:
        """Reads the keys. Raises ConfigError."""
        keys = None if config.key_file is None else Keys.read(config.key_file)
        return cls(config.ttl_s, keys)

    def pack(self, owner: str, image: StoredImage) -> bytes:
        source = image.source
        if isinstance(source, bytes):
            described, data = (_ENCODED, image.width, image.height, 0, 0, 0), source
        else:
            height, width, channels = source.shape
            described = (_PIXELS, image.width, image.height, height, width, channels)
            data = source.tobytes()
        return self._packed(owner, image.image_id, _IMAGE.pack(*described) + data)

    def pack_deleted(self, owner: str, image_id: str) -> bytes:
        """A value that says that the image was deleted. It has at most OVERHEAD_BYTES."""
        return self._packed(owner, image_id, _IMAGE.pack(_DELETED, 0, 0, 0, 0, 0))

    def _packed(self, owner: str, image_id: str, body: bytes) -> bytes:
        key_id = b"" if self._keys is None else self._keys.first.encode()
        expires_ms = int(1000 * (clock.wall() + self._ttl_s))
        header = _HEADER.pack(_MAGIC, expires_ms, len(key_id)) + key_id
        context = _context(header, owner, image_id)
        if self._keys is not None:
            return header + self._keys.seal(body, context)
        return header + _sum(context, body) + body

    def unpack(self, owner: str, image_id: str, value: bytes) -> StoredImage:
        """Raises Unreadable, and Deleted, which is one."""
        if len(value) < _HEADER.size:
            raise Unreadable("it is cut off")
        magic, expires_ms, id_bytes = _HEADER.unpack_from(value)
        if magic != _MAGIC:
            raise Unreadable("it is no image, or of another version")
        if expires_ms <= 1000 * clock.wall():
            raise Unreadable("it has expired")
        end = _HEADER.size + id_bytes
        header, rest = value[:end], memoryview(value)[end:]
        body = self._body(header[_HEADER.size :], rest, _context(header, owner, image_id))
        return _image(image_id, body)

    def _body(self, key_id: bytes, rest: memoryview, context: bytes) -> memoryview:
        if bool(key_id) != (self._keys is not None):
            raise Unreadable(
                "it is encrypted, and this server has no keys" if key_id else "it is not encrypted"
            )
        if self._keys is not None:
            return memoryview(self._keys.open(key_id.decode("latin-1"), rest, context))
        body = rest[_SUM_BYTES:]
        if _sum(context, body) != rest[:_SUM_BYTES]:
            raise Unreadable("it is damaged, or of another caller")
        return body


def _image(image_id: str, body: memoryview) -> StoredImage:
    """Raises Unreadable. Only a party that can make valid values can make a body of the wrong form."""
    if len(body) < _IMAGE.size:
        raise Unreadable("it is cut off")
    kind, width, height, rows, columns, channels = _IMAGE.unpack_from(body)
    data = bytes(body[_IMAGE.size :])
    if kind == _DELETED:
        raise Deleted("its owner has deleted it")
    if kind == _ENCODED and data:
        return StoredImage(image_id, data, width, height)
    shape = (rows, columns, channels)
    if kind != _PIXELS or not data or len(data) != rows * columns * channels or channels > 4:
        raise Unreadable("it has another form")
    return StoredImage(image_id, np.frombuffer(data, np.uint8).reshape(shape), width, height)


def _context(header: bytes, owner: str, image_id: str) -> bytes:
    name = owner.encode()
    return header + struct.pack(">I", len(name)) + name + image_id.encode()


def _sum(context: bytes, body: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(struct.pack(">I", len(context)) + context)
    digest.update(body)
    return digest.digest()


def _decoded(text: str) -> bytes:
    try:
        return base64.urlsafe_b64decode(text.translate({43: "-", 47: "_"}) + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return b""
