"""Commands that operate a server: its administration and its health."""
