"""The engine's flags, and the RuntimeConfigs that they give.

For ``serve``, ``--model`` may be given several times. Each value is a model's name, which settings of
this model alone may follow: ``moondream2,kv-cache-gib=8,device=cuda:1``. The other flags apply to all models.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Container, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
from .sources import OFF, ON, name_of

SOURCE_FLAGS = ("model",)
"""The group of flags that name the model and its files."""
DEVICE_FLAGS = (*SOURCE_FLAGS, "device")
"""SOURCE_FLAGS, and the flags that choose device and precision."""

MOST_MODELS = 16
_MOST_TEXT = 4096
_PLACES = frozenset(
    {
        *("model_path", "tokenizer_path", "refiner", "calibration"),
        *("weights_cache", "adapters_dir", "kernel_cache_dir"),
    }
)
"""Fields of files and folders."""
_NO_PLACES = (None, "auto", "off", "moondream/SegHeadRefiner")
"""Values of these fields that are words."""
_POOL_SIZES = {"kv_cache_gib", "kv_cache_pages"}
"""Only one of these fields may be set."""


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


def runtime_config(args: argparse.Namespace) -> RuntimeConfig:
    """The configuration of a command that needs one model. Raises SettingsError, which names the invalid flag."""
    configs = runtime_configs(args)
    if len(configs) > 1:
        raise SettingsError(
            f"{name_of(args, '--model')}: {len(configs)} models are given, and this command takes one"
        )
    return configs[0]


def runtime_configs(args: argparse.Namespace) -> tuple[RuntimeConfig, ...]:
    """The configurations of all models, the default first. Raises SettingsError, which names the invalid flag."""
    given: list[str] = args.model if isinstance(args.model, list) else [args.model]
    where = name_of(args, "--model")
    if not 1 <= len(given) <= MOST_MODELS:
        raise SettingsError(
            f"{where}: {len(given)} models are given; there may be 1 to {MOST_MODELS}"
        )
    weights = getattr(args, dest_of("--weights"), None)
    if len(given) > 1 and weights is not None:
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
    for text in given:
        name, *overrides = text.split(",")
        values = _overrides(overrides, f"{where}={text}")
        configs.append(configured(RuntimeConfig, args, model=name, **nested, **values))
    if len(configs) > 1:
        _check_distinct(configs, where)
    return tuple(configs)


def other_model(
    base: RuntimeConfig, text: str, folders: Iterable[str] = (), named: Container[str] = ()
) -> RuntimeConfig:
    """The configuration of a further model, ``text`` as behind ``--model``, with the settings of ``base`` otherwise.
    A caller may only name files in ``folders``, and the models ``named`` at the start. Raises InvalidRequest."""
    if not 1 <= len(text) <= _MOST_TEXT:
        raise InvalidRequest("model", f"must have 1 to {_MOST_TEXT} characters")
    name, *overrides = text.split(",")
    try:
        values = _overrides(overrides, "model")
        if not maintenance.is_model_name(name):
            _check_place("model", name, folders, named)
        for field in _PLACES & values.keys():
            if values[field] not in _NO_PLACES:
                _check_place(field, str(values[field]), folders, named)
        own = {"model_path": None, "tokenizer_path": None, **values}
        config = dataclasses.replace(base, model=name, **own)
        maintenance.check_model_names(config)
    except SettingsError as error:
        raise InvalidRequest("model", str(error).removeprefix("model: ")) from None
    except ConfigError as error:
        raise InvalidRequest("model", f"{error.field}={error.value}: {error.limit}") from None
    return config


def _check_place(field: str, place: str, folders: Iterable[str], named: Container[str]) -> None:
    """Raises InvalidRequest for a file, folder or address that a caller may not name. Its text does not depend on what
    the disk holds."""
    if place in named:
        return
    if not any(_is_in(place, folder) for folder in folders):
        raise InvalidRequest(
            "model",
            f"{field}={place[:200]!r} is no known model, no hub id, and in no folder from which this server "
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
        inside, outer = (Path(each).expanduser().resolve() for each in (place, folder))
    except (OSError, RuntimeError, ValueError):
        return False
    return inside.is_relative_to(outer)


def config_error(error: ConfigError, args: argparse.Namespace) -> SettingsError:
    """The engine's ConfigError as a SettingsError that names the flag, variable or key that gave the value."""
    return settings_error(error, args, RuntimeConfig, AdapterSources, ImageLimits)


def _overrides(texts: Iterable[str], where: str) -> dict[str, Any]:
    """The fields that the settings behind a model's name set. ``where``: for errors. Raises SettingsError."""
    values = dict(_override(each, where) for each in texts)
    if not _POOL_SIZES.isdisjoint(values):  # They replace the one that applies to all models.
        values = dict.fromkeys(_POOL_SIZES) | values
    return values


def _override(text: str, where: str) -> tuple[str, Any]:
    """The field and the value of KEY=VALUE behind a model's name. ``where``: for errors. Raises SettingsError."""
    key, equals, value = text.partition("=")
    fields = {
        setting.flag.removeprefix("--"): (field, setting)
        for field, setting in settings_of(RuntimeConfig).items()
        if field != "model"
    }
    if not equals or key not in fields:
        near = get_close_matches(key, fields, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise SettingsError(f"{where}: {text!r} is not SETTING=VALUE of a model's setting{hint}")
    field, setting = fields[key]
    if setting.kind == "bool":
        if value.lower() not in (*ON, *OFF):
            raise SettingsError(f"{where}: {key} must be on or off")
        return field, field_value(setting, "on" if value.lower() in ON else "off")
    try:
        parsed = parser_of(setting)(value)
    except ValueError as error:
        raise SettingsError(f"{where}: {key}={value}: {error}") from None
    if setting.choices and parsed not in setting.choices:
        raise SettingsError(f"{where}: {key} must be one of {', '.join(setting.choices)}")
    return field, field_value(setting, parsed)


def _check_distinct(configs: Iterable[RuntimeConfig], where: str) -> None:
    """Raises SettingsError if two configurations name the same weights."""
    seen: set[str] = set()
    for config in configs:
        name = config.model if config.model_path is None else str(config.model_path)
        if name in seen:
            raise SettingsError(f"{where}: {name} is given twice")
        seen.add(name)
