"""What the client returns: frozen dataclasses read from messages, and their other forms."""
