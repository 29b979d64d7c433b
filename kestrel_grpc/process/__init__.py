"""The server process: start and stop, signals, systemd, and the interpreter's settings."""
