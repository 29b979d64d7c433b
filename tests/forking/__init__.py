"""Processes that tests start by forking one that has imported torch and gRPC, because to import them takes seconds."""
