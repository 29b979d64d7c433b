"""Who calls: TLS identities, tokens, and the principal that they stand for."""
