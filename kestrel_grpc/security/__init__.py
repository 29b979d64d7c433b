"""Who may call and how much: TLS, principals and their tokens, admission, the edges of a connection."""
