"""Traces and metrics of the service, by OpenTelemetry. Optional: without its packages the server runs unmeasured.

``config`` says what to export, ``opening`` makes it; ``names`` holds every name that leaves the process.
"""
