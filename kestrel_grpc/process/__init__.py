"""A process that serves: the server's start and stop, signals, systemd, the interpreter's settings."""
