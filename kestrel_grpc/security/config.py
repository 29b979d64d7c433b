"""SecurityConfig: what protects the server, frozen. The flags that give it are in flags.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files, read again whenever one of them changes."""

    certificate: str
    """The server's chain, its own certificate first."""
    private_key: str
    client_ca: str | None = None
    """Authorities of the certificates that clients must show; None asks for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """By default nobody is asked who they are, which the server offers on loopback and unix sockets only."""

    tls: TlsFiles | None = None
    """For all TCP addresses; unix sockets are protected by their files' permissions."""
    insecure_listen: bool = False
    """Whether to listen beyond loopback without TLS or without asking who calls."""

    @property
    def knows_callers(self) -> bool:
        """Whether a caller must show who it is."""
        return self.tls is not None and self.tls.client_ca is not None
