"""What an operator can set: frozen configurations, their flags, variables and file, and where each value came from."""
