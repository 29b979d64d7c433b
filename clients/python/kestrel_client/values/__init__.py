"""The values that the client returns: frozen dataclasses, read from messages, and their exports."""
