"""The front of several workers: Envoy, its configuration, its certificates, and the process that runs it."""
