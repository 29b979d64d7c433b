"""The TCP connections of the server: which there are, what each receives, and which are ended."""
