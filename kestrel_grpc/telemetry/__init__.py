"""Traces and metrics of the service, with OpenTelemetry. Without OpenTelemetry's packages the server runs unmeasured.

``settings/telemetry.py`` decides what to export. ``opening`` creates tracing, metrics and exporters. ``names`` holds
every exported name.
"""
