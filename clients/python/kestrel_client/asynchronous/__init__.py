"""The asynchronous clients, by hand, from which the synchronous ones are generated."""
