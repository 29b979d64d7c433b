"""The address of a Ray cluster's head, checked before Ray tries for minutes to reach it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_VARIABLE = "RAY_ADDRESS"
_WITHIN_S = 5.0


class ClusterError(Exception):
    """The cluster cannot be reached, or cannot run the servers. The message is one line."""


def checked_head(environ: Mapping[str, str] = os.environ) -> str:
    """The address for ``ray.init``: of RAY_ADDRESS, or "auto", with which Ray looks for a node on this machine. Raises
    ClusterError."""
    address = environ.get(_VARIABLE) or "auto"
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or "/" in host:
        raise ClusterError(
            f"{_VARIABLE}={address}: must be HOST:PORT of the head, or auto on a node of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), _WITHIN_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"{_VARIABLE}={address}: no Ray head answers there ({why}); start one with ray start --head"
        ) from None
    return address
