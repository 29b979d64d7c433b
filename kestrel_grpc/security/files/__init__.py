"""The files that protect the server: checks of their permissions, and detection of changes."""
