"""The settings of an engine, and what a setting is."""

from .model_settings import ModelPaths
from .runtime import RuntimeConfig

__all__ = ["ModelPaths", "RuntimeConfig"]
