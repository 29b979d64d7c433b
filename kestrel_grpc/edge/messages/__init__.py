"""The messages of a call: reading requests within the reserved memory, and what their fields say."""
