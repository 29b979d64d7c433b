"""Decoder processes: their template, their code, and the memory that they share with the server."""
