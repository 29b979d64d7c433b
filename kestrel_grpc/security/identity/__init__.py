"""Who calls: TLS identities, revoked certificates, tokens, and the principal that they stand for."""
