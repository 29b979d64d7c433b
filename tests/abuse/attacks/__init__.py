"""Attacks on a server on this machine, each bounded in count and time. ``python -m tests.abuse.attacks`` runs them."""

from tests.abuse.attacks import calls, connections, constraints, http_requests, messages
from tests.abuse.attacks.beside_polite import run
from tests.abuse.attacks.registry import ATTACKS, MIB

__all__ = [
    "ATTACKS", "MIB", "calls", "connections", "constraints", "http_requests", "messages", "run",
]  # fmt: skip
