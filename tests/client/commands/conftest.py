"""The commands' servers: the real one, in this process, and certificates."""

from tests.service.certificates import authority, server_pair
from tests.service.conftest import serve

__all__ = ["authority", "serve", "server_pair"]
