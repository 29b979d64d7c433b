"""The engine's flags, and the RuntimeConfig that they give."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

from kestrel_engine import ConfigError, ImageLimits, RuntimeConfig

from .flags import SettingsError, add_settings, configured, settings_error

SOURCE_FLAGS = ("model",)
"""The group of flags that name the model and its files."""
DEVICE_FLAGS = (*SOURCE_FLAGS, "device")
"""SOURCE_FLAGS, and the flags that choose device and precision."""


def add_model_flags(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
) -> None:
    """``only``: SOURCE_FLAGS or DEVICE_FLAGS for a command that needs no other flags; None adds all."""
    add_settings(parser, RuntimeConfig, ImageLimits, only=only, environ=environ)


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """Raises SettingsError, which names the invalid flag."""
    return configured(RuntimeConfig, args, image_limits=configured(ImageLimits, args))


def config_error(error: ConfigError, args: argparse.Namespace) -> SettingsError:
    """The engine's ConfigError as a SettingsError that names the flag, variable or key that gave the value."""
    return settings_error(error, args, RuntimeConfig, ImageLimits)
