"""Order: which sequences wait, which go first, and which the next step computes."""
