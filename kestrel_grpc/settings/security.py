"""SecurityConfig: what protects the server, frozen. The flags that give it are in flags.py."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB = 1024
_A_LITTLE_S = 10.0
GIB = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files, read again whenever one of them changes."""

    certificate: str
    """The server's chain, its own certificate first."""
    private_key: str
    client_ca: str | None = None
    """Authorities of the certificates that clients must show; None asks for none."""
    client_crl: str | None = None
    """What these authorities, and those of scrapers, have taken back (revocation.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What one principal, and all together, may ask for at a time. None: no limit."""

    calls: int | None = 1024
    """A principal's calls in progress."""
    held_bytes: int | None = 4 * GIB
    """Requests' messages in memory, of all callers."""
    rate: float | None = None
    """A principal's calls a second, in the long run."""
    burst: int = 10
    """A principal's calls at once, after a pause."""
    deadline_s: float | None = 120.0
    """Seconds that a call may take, whatever deadline its caller sets."""
    write_s: float | None = 60.0
    """Seconds that a stream waits for its reader to take what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may do. None: no limit."""

    metadata_bytes: int = 16 * KIB
    """Of one call."""
    streams: int = 1024
    """Calls in progress."""
    age_s: float | None = 1800.0
    """Seconds after which a client is asked to connect anew, a tenth more or less; calls in progress may end."""
    age_grace_s: float | None = None
    """Seconds that they have for it. Default: what the longest call may take, and a little more."""
    keepalive_s: float | None = 60.0
    """Seconds of silence after which a client is asked whether it is still there."""
    keepalive_timeout_s: float = 20.0
    """Seconds that it has to answer; then its connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """By default nobody is asked who they are, which the server offers on loopback and unix sockets only."""

    tls: TlsFiles | None = None
    """For all TCP addresses; unix sockets are protected by their files' permissions."""
    auth_tokens: str | None = None
    """The file that says whose tokens are which (tokens.py); read again when it changes."""
    api_key: str | None = field(default=None, repr=False)
    """A token of its own that may do everything."""
    open_health: bool = True
    """Whether health answers callers without credentials."""
    open_reflection: bool = True
    open_metrics: bool = False
    """Whether --metrics-listen answers scrapers without a token; where callers have none it asks for none."""
    metrics_tls: bool = True
    """Whether --metrics-listen shows the server's certificate, if there is one."""
    metrics_client_ca: str | None = None
    """Authorities of the certificates that scrapers must show; None asks for none."""
    insecure_listen: bool = False
    """Whether to listen beyond loopback without TLS or without asking who calls."""
    calls: CallLimits = field(default_factory=CallLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)

    @property
    def age_grace_s(self) -> float | None:
        """Seconds that an aged connection's calls may go on; None without an end."""
        if self.connections.age_grace_s is not None:
            return self.connections.age_grace_s
        return None if self.calls.deadline_s is None else self.calls.deadline_s + _A_LITTLE_S

    @property
    def has_tokens(self) -> bool:
        return self.auth_tokens is not None or self.api_key is not None

    @property
    def client_ca(self) -> str | None:
        """Authorities of callers' certificates."""
        return None if self.tls is None else self.tls.client_ca

    @property
    def knows_callers(self) -> bool:
        """Whether a caller must show who it is."""
        return self.has_tokens or self.client_ca is not None
