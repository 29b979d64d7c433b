"""The messages of a call: reading requests within the reserved memory, and writing responses within a time."""
