"""The flags of the engine: from them comes a RuntimeConfig."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from kestrel_engine import ConfigError, ImageLimits, RuntimeConfig

from .flags import SettingsError, add_settings, configured, settings_error

SOURCE_FLAGS = ("model",)
"""The group of flags that say which model, and where it is."""
DEVICE_FLAGS = (*SOURCE_FLAGS, "device")
"""Also where it is computed, and how exactly."""


def add_model_flags(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
) -> None:
    """``only``: SOURCE_FLAGS or DEVICE_FLAGS, for a command that needs no more."""
    add_settings(parser, RuntimeConfig, ImageLimits, only=only, environ=environ)


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """Raises SettingsError naming the flag at fault."""
    return configured(RuntimeConfig, args, image_limits=configured(ImageLimits, args))


def config_error(error: ConfigError, args: argparse.Namespace) -> SettingsError:
    """A ConfigError of the engine in terms of the flag, variable or key that the value is from."""
    return settings_error(error, args, RuntimeConfig, ImageLimits)
