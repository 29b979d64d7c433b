"""The JSON of each kind of client: its routes, its fields, and its answers."""
