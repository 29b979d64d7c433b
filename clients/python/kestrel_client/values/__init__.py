"""The values that the client takes and returns: frozen dataclasses, read from messages."""
