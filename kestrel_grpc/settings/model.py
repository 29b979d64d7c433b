"""The engine's flags, and the RuntimeConfigs that they give.

For ``serve``, ``--model`` may be given several times. Each value is a model's name, which settings of
this model alone may follow: ``moondream2,kv-cache-gib=8,device=cuda:1``. The other flags apply to all models.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from kestrel_client.commands.parser import suggestion
from kestrel_engine import (
    AdapterSources,
    ConfigError,
    ImageLimits,
    InvalidRequest,
    RuntimeConfig,
    maintenance,
    settings_of,
)

from .flags import (
    SettingsError,
    add_settings,
    configured,
    dest_of,
    field_value,
    parser_of,
    settings_error,
)
from .sources import name_of

SOURCE_FLAGS = ("model",)
"""The group of flags that name the model and its files."""
DEVICE_FLAGS = (*SOURCE_FLAGS, "device")
"""SOURCE_FLAGS, and the flags that choose device and precision."""

MOST_MODELS = 16
_MOST_TEXT = 4096
_MOST_SETTINGS, _MOST_KEY = 64, 64
_PLACES = frozenset(
    "model_path tokenizer_path refiner calibration cache_dir adapters_dir kernel_cache_dir".split()
)
"""Fields of files and folders."""
_NO_PLACES = (None, "auto", "off", "moondream/SegHeadRefiner")
"""Values of these fields that are words."""
_OF_PRECISION = dict.fromkeys(("dtype", "fp8_gemms", "kv_cache_dtype"), "auto")
"""Fields that the precision of a further model sets again."""


def add_model_flags(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    *,
    several: bool = False,
) -> None:
    """``only``: SOURCE_FLAGS or DEVICE_FLAGS for a command that needs no other flags; None adds all. ``several``:
    ``--model`` may be given several times."""
    lists = ("model",) if several else ()
    configs = (RuntimeConfig, AdapterSources, ImageLimits)
    add_settings(parser, *configs, only=only, several=lists, environ=environ)
    # A secret has no flag, because every user of the machine can read the flags of its processes.
    key = (os.environ if environ is None else environ).get("MOONDREAM_API_KEY") or None
    parser.set_defaults(adapter_api_key=key)


def runtime_configs(args: argparse.Namespace) -> tuple[RuntimeConfig, ...]:
    """The configurations of all models, the default first. Raises SettingsError, which names the invalid flag."""
    names: list[str] = args.model if isinstance(args.model, list) else [args.model]
    where = name_of(args, "--model")
    if not 1 <= len(names) <= MOST_MODELS:
        raise SettingsError(
            f"{where}: {len(names)} models are given; there may be 1 to {MOST_MODELS}"
        )
    weights = getattr(args, dest_of("--weights"), None)
    if len(names) > 1 and weights is not None:
        raise SettingsError(
            f"{name_of(args, '--weights')}={weights}: applies to one model; with several, "
            "write --model NAME,weights=PATH"
        )
    nested = {
        "image_limits": configured(ImageLimits, args),
        "adapter_sources": configured(
            AdapterSources, args, api_key=getattr(args, "adapter_api_key", None)
        ),
    }
    configs = []
    for text in names:
        name, *overrides = text.split(",")
        values = _overrides(overrides, f"{where}={text}")
        configs.append(configured(RuntimeConfig, args, model=name, **nested, **values))
    if len(configs) > 1:
        _check_distinct(configs, where)
    return tuple(configs)


def other_model(
    base: RuntimeConfig,
    source: str,
    settings: Mapping[str, str],
    folders: Iterable[str] = (),
    named: Container[str] = (),
) -> RuntimeConfig:
    """The configuration of a further model: ``source`` as `--model`, ``settings`` by the names of their flags, and the
    settings of ``base`` otherwise. A caller may only name files in ``folders``, and the models ``named`` at the start.
    Raises InvalidRequest."""
    if not 1 <= len(source) <= _MOST_TEXT:
        raise InvalidRequest("source", f"must have 1 to {_MOST_TEXT} characters")
    if len(settings) > _MOST_SETTINGS:
        raise InvalidRequest(
            "settings", f"has {len(settings)} settings; the limit is {_MOST_SETTINGS}"
        )
    values: dict[str, Any] = {}
    for key, text in sorted(settings.items()):
        where = _entry(key)
        if not 1 <= len(key) <= _MOST_KEY:
            raise InvalidRequest(
                where, f"has a name of {len(key)} characters; must be 1 to {_MOST_KEY}"
            )
        if len(text) > _MOST_TEXT:
            raise InvalidRequest(where, f"has {len(text)} characters; the limit is {_MOST_TEXT}")
        try:
            field, value = _override(key, text)
        except SettingsError as error:
            raise InvalidRequest(where, str(error)) from None
        if field in _PLACES and value not in _NO_PLACES:
            _check_place(where, str(value), folders, named)
        values[field] = value
    if not maintenance.is_name(source):
        _check_place("source", source, folders, named)
    own = {"model_path": None, "tokenizer_path": None, **values}
    if "precision" in values:
        own |= _OF_PRECISION
    try:
        config = dataclasses.replace(base, model=source, **own)
        maintenance.served_name(config)
    except ConfigError as error:
        flag = _flags().get(error.field)
        where = "source" if flag not in settings else _entry(str(flag))
        raise InvalidRequest(where, f"{error.value}: {error.limit}") from None
    return config


def _entry(key: str) -> str:
    """The path of a setting in a request."""
    return f'settings["{key[:_MOST_KEY]}"]'


def _check_place(where: str, place: str, folders: Iterable[str], named: Container[str]) -> None:
    """Raises InvalidRequest for a file, folder or address that a caller may not name. Its text does not depend on what
    the disk holds."""
    if place in named:
        return
    if not any(_is_in(place, folder) for folder in folders):
        raise InvalidRequest(
            where,
            f"{place[:200]!r} is no known model, no hub id, and in no folder from which this server "
            "loads models by path (--model-folders)",
        )


def _is_in(place: str, folder: str) -> bool:
    if "://" in place or "://" in folder:
        return (
            f"{place}/".startswith(f"{folder.rstrip('/')}/")
            and ".." not in place
            and "://" in folder
        )
    try:
        inside, outer = (Path(os.path.expanduser(each)).resolve() for each in (place, folder))
    except (OSError, RuntimeError, ValueError):
        return False
    return inside.is_relative_to(outer)


def config_error(error: ConfigError, args: argparse.Namespace) -> SettingsError:
    """The engine's ConfigError as a SettingsError that names the flag, variable or key that gave the value."""
    return settings_error(error, args, RuntimeConfig, AdapterSources, ImageLimits)


def _overrides(texts: Iterable[str], where: str) -> dict[str, Any]:
    """The fields that the settings behind a model's name set. ``where``: for errors. Raises SettingsError."""
    values: dict[str, Any] = {}
    for each in texts:
        key, equals, value = each.partition("=")
        if not equals:
            raise SettingsError(f"{where}: {each!r} is not SETTING=VALUE of a model's setting")
        try:
            field, read = _override(key, value)
        except SettingsError as error:
            raise SettingsError(f"{where}: {key}={value}: {error}") from None
        values[field] = read
    return values


@functools.cache
def _flags() -> dict[str, str]:
    """The names of the flags of a model's settings, without their dashes, by field."""
    return {
        field: setting.flag.removeprefix("--")
        for field, setting in settings_of(RuntimeConfig).items()
        if field != "model"
    }


def _override(key: str, value: str) -> tuple[str, Any]:
    """The field and the value of a setting, by the name of its flag. Raises SettingsError."""
    fields = {flag: field for field, flag in _flags().items()}
    if key not in fields:
        raise SettingsError(f"is not a setting of a model{suggestion(key, fields)}")
    field = fields[key]
    setting = settings_of(RuntimeConfig)[field]
    try:
        parsed = parser_of(setting)(value)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    if setting.choices and parsed not in setting.choices:
        raise SettingsError(f"must be one of {', '.join(setting.choices)}")
    return field, field_value(setting, parsed)


def _check_distinct(configs: Iterable[RuntimeConfig], where: str) -> None:
    """Raises SettingsError if two configurations name the same weights."""
    seen: set[str] = set()
    for config in configs:
        name = config.model if config.model_path is None else str(config.model_path)
        if name in seen:
            raise SettingsError(f"{where}: {name} is given twice")
        seen.add(name)
