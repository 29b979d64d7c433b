"""Batches on the server: requests that callers leave in a file, answered at low priority and kept until they expire."""
