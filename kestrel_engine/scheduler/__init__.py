"""The scheduler: which sequences compute what in the next step. Pure Python."""
