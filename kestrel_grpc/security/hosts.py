"""Hosts: the values of the header Host that a port answers to.

A page of any site can give its own name this machine's address (DNS rebinding). The browser then takes the port for a
part of that site, so the page may send anything and read every response. But the header Host still has the site's name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from ..settings.addresses import unix_path
from ..settings.security import SecurityConfig
from .listening import is_loopback

ANY = "*"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")


class Hosts:
    """``address``: the port's. ``names``: of --http-hosts; ANY stands for all."""

    def __init__(self, address: str, names: Collection[str], security: SecurityConfig) -> None:
        self._names = names
        self._is_loopback = is_loopback(address)
        # No browser connects to a unix socket. A page of another site has no token, and no certificate for its name.
        is_safe = security.knows_callers or security.tls is not None
        self._takes_all = (
            ANY in names or unix_path(address) is not None or (is_safe and not self._is_loopback)
        )
        self._own_name = socket.gethostname().lower()

    def accepts(self, host: str) -> bool:
        """Whether the port answers to this value, with or without a port.

        On loopback: localhost and addresses of loopback. Elsewhere: localhost, all addresses, and the names that no
        stranger can own: this machine's, and names without a dot.
        """
        if self._takes_all:
            return True
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return False
        name = found[1].strip("[]").removesuffix(".")
        if name in self._names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return not self._is_loopback and (name == self._own_name or "." not in name)
        return address.is_loopback or not self._is_loopback
