"""The server's settings: frozen configuration classes, their flags, variables and file, and each value's source."""
