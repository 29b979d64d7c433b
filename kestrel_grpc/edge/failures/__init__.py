"""The calls that fail: the server's own errors, the status of each error, and the end of the call."""
