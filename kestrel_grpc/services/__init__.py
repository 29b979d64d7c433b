"""The gRPC services, and the conversion between their messages and the engine's requests."""
