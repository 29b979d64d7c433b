"""Access to the server: TLS, principals and their tokens, and the limits of calls."""
