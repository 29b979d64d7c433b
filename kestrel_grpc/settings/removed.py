"""The settings that version 0.1.0 had, and what takes their place."""

from __future__ import annotations

from collections.abc import Mapping

from kestrel_client.commands.sources import SettingsError, variable_of

_FIXED = "its default is right for every server"
_OPEN = "use the setting open, a list such as health,reflection"
_REMOVED = {
    **dict.fromkeys(("dtype", "fp8-gemms", "kv-cache-dtype"), "use precision"),
    **dict.fromkeys(("weights-cache", "adapter-downloads"), "use cache-dir"),
    "model-path": "use weights",
    "kv-cache-pages": "use kv-cache-gib",
    "http-max-connections": "max-connections limits HTTP connections too",
    **dict.fromkeys(("open-health", "open-reflection", "open-metrics"), _OPEN),
    "metrics-client-ca": "use metrics-tls with the file",
    "token-budget-file": "use token-budget with file=PATH",
    "ray-address": "use the variable RAY_ADDRESS",
    "no-cuda-graphs": "no-compile is for debugging",
    "http-metrics": "with the extra telemetry, the HTTP port serves metrics",
    **dict.fromkeys(("decode-bytes", "embedding-cache-bytes", "embedding-host-bytes"), _FIXED),
    **dict.fromkeys(("burst", "keepalive", "replica-cpus", "scale-up-delay"), _FIXED),
}


def successor(key: str) -> str:
    """``; it is gone: …`` for a setting that was removed, by the name of its flag without dashes; else ""."""
    text = _REMOVED.get(key)
    return "" if text is None else f"; it is gone: {text}"


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises SettingsError for the variable of a setting that was removed."""
    for key in _REMOVED:
        variable = variable_of(key)
        if environ.get(variable):
            raise SettingsError(f"{variable}: unknown variable{successor(key)}")
