"""Observes the server's TCP connections, and ends those that exceed limits."""
