"""The sockets of the HTTP port: accepts connections, ends them, and divides what they send into requests."""
