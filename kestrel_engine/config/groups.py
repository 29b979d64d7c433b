"""The groups of an engine's settings: headings of ``--help``, and tables of the configuration file."""

from __future__ import annotations

from .setting import SettingGroup

MODEL = SettingGroup("model", "model")
DEVICE = SettingGroup("device", "device")
REQUESTS = SettingGroup("limits and defaults of requests", "requests")
SCHEDULER = SettingGroup("caches and steps", "scheduler")
