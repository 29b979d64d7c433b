"""The files that protect the server: who may read them, and when they have changed."""
