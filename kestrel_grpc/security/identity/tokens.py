"""Bearer tokens: makes tokens, and reads the file of tokens and principals. The server holds only hashes of tokens.

A token has 256 random bits, so a plain SHA-256 is as safe as a slow hash. A slow hash would cost the server's time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from kestrel_engine import read_small_file

from ...settings.budgets import parsed_tokens
from ..files import writable_by_all
from .principal import Principal, Scope

TOKEN_PREFIX = "kst_"
"""Lets secret scanners and users recognise a token."""
_TOKEN_BYTES = 32
_MOST_BYTES = 1 << 24
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@/:-]{0,127}")
_SHA256 = re.compile(r"sha256:([0-9a-fA-F]{64})")
_MIN_KEY_LENGTH = 16
_CERTIFICATE = "cert:"
_OPTION = re.compile(r"(weight|minute|day)=(\S+)\s+(.+)")
_LINE = "NAME SCOPES [weight=W] [minute=TOKENS] [day=TOKENS]"
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


class TokenFileError(Exception):
    """The file of tokens, or the key, cannot be used. The message names the place and the cause in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The principals by token and by certificate. A lookup takes the same time for every token, known or unknown."""

    by_identity: dict[str, Principal] = field(default_factory=dict)
    """The principals by the name in a client's certificate (callers.py)."""
    by_name: dict[str, Principal] = field(default_factory=dict)
    """The first line of each principal. All its lines have the same weight and budgets."""
    _by_tag: dict[bytes, tuple[bytes, Principal]] = field(default_factory=dict, repr=False)
    """Digest and principal by a keyed hash of the digest, so that the time of a lookup reveals no digest."""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def add(self, digest: bytes, principal: Principal) -> bool:
        """Adds a token's digest. Returns whether it is new."""
        tag = self._tag(digest)
        known = tag in self._by_tag
        self._by_tag.setdefault(tag, (digest, principal))
        return not known

    def of_token(self, token: str) -> Principal | None:
        digest = digest_of(token)
        known, principal = self._by_tag.get(self._tag(digest), (bytes(32), None))
        return principal if hmac.compare_digest(known, digest) else None

    def _tag(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._key, digest_size=16).digest()


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def line_of(name: str, scopes: Iterable[Scope], token: str) -> str:
    """The token's line in the file. Raises ValueError for an invalid name."""
    check_name(name)
    return f"{name} {','.join(scopes)} sha256:{digest_of(token).hex()}"


def check_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r}: a name must have 1 to 128 letters, digits and . _ @ / : - and begin with a letter or digit"
        )
    return name


def parse_scopes(text: str) -> frozenset[Scope]:
    """Scopes from names that are separated by commas. Raises ValueError."""
    try:
        return frozenset(Scope(name) for name in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r}: scopes are {', '.join(Scope)}, separated by commas") from None


def read_credentials(path: str) -> Credentials:
    """Reads the file of tokens. Raises TokenFileError.

    A line is NAME SCOPES [weight=W] [minute=TOKENS] [day=TOKENS], and then sha256:HEX or cert:IDENTITY. A line that
    begins with # is a comment.
    """
    try:
        lines = read_small_file(path, _MOST_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise TokenFileError(f"cannot read the tokens {path}: {why}") from None
    if writable_by_all(path):
        raise TokenFileError(
            f"every user of this machine may write the tokens {path}: chmod o-w, and check its lines"
        )
    credentials = Credentials()
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            _add_line(credentials, text)
        except ValueError as error:
            # The message does not show the line, because it may hold a token by mistake.
            raise TokenFileError(f"{path}, line {number}: {error}") from None
    return credentials


def add_api_key(credentials: Credentials, key: str) -> None:
    """Adds a key with all scopes, for a principal named "default". Raises TokenFileError."""
    if re.fullmatch(r"[!-~]+", key) is None or len(key) < _MIN_KEY_LENGTH:
        raise TokenFileError(
            f"KESTREL_API_KEY: must have at least {_MIN_KEY_LENGTH} visible ASCII characters"
        )
    credentials.add(digest_of(key), Principal("default", frozenset(Scope)))


def _add_line(credentials: Credentials, text: str) -> None:
    """Adds the token or certificate of one line. Raises ValueError."""
    parts = text.split(maxsplit=2)
    if len(parts) != 3:
        raise ValueError(f"a line is {_LINE} sha256:HEX or {_LINE} cert:IDENTITY")
    name, scopes, shown = check_name(parts[0]), parse_scopes(parts[1]), parts[2]
    options: dict[str, str] = {}
    while option := _OPTION.fullmatch(shown):
        if option[1] in options:
            raise ValueError(f"{option[1]} is given twice")
        options[option[1]], shown = option[2], option[3]
    principal = Principal(
        name,
        scopes,
        _parse_weight(options.get("weight", "1")),
        **{f"{k}_tokens": parsed_tokens(k, options[k]) for k in ("minute", "day") if k in options},
    )
    earlier = credentials.by_name.setdefault(name, principal)
    for key in ("weight", "minute_tokens", "day_tokens"):
        if (value := getattr(earlier, key)) != getattr(principal, key):
            told = "none" if value is None else f"{value:g}" if key == "weight" else value
            raise ValueError(f"{name} has {key.partition('_')[0]}={told} on an earlier line")
    if shown.startswith(_CERTIFICATE):
        if not (identity := shown.removeprefix(_CERTIFICATE)):
            raise ValueError(
                "cert: needs the name in the certificate, such as cert:spiffe://site/gate"
            )
        if credentials.by_identity.setdefault(identity, principal) is not principal:
            raise ValueError(f"an earlier line has the certificate {identity!r} too")
        return
    match = _SHA256.fullmatch(shown)
    if match is None:
        raise ValueError("the third part must be sha256: and 64 hexadecimal digits, or cert:…")
    if not credentials.add(bytes.fromhex(match[1]), principal):
        raise ValueError("an earlier line has the same token")


def _parse_weight(text: str) -> float:
    allowed = f"a weight is a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    try:
        weight = float(text)
    except ValueError:
        raise ValueError(f"weight={text}: {allowed}") from None
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight={text}: {allowed}")
    return weight
