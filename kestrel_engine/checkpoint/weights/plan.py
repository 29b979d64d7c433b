"""Matches the stored tensors of a checkpoint, by names, shapes and dtypes, with those that a model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ...errors import CheckpointError, ConfigError
from ...types.model_config import Family, ModelConfig, parse_model_config
from ...types.model_config import detect_family as family_of_config
from ..files import StoredTensor
from .expected import OPTIONAL, expected_tensors
from .names import TensorPart, detect_family, map_names, scale_name

SHOWN = 10
"""Number of names of one kind that an error message lists. The error's attributes hold all names."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One canonical tensor: its shape, the part of a stored tensor that it is, its scales and zero points, if any."""

    name: str
    shape: tuple[int, ...]
    stored: StoredTensor
    part: TensorPart
    scale: StoredTensor | None = None
    zero_point: StoredTensor | None = None

    @property
    def sources(self) -> tuple[StoredTensor, ...]:
        found = (self.stored, self.scale, self.zero_point)
        return tuple(tensor for tensor in found if tensor is not None)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Faults:
    """Why a checkpoint can't be loaded: names of tensors, by kind of fault. ``details``: text in place of a name."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    misshaped: Sequence[str] = ()
    nonfinite: Sequence[str] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped or self.nonfinite)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """``tensors``: in the order of the files' data. ``ignored``: stored names that are not needed. ``kv_scales``: the
    existing scales of an FP8 KV cache, by `names.kv_scale_name`; `kv_scales.read` checks their values.
    """

    tensors: tuple[TensorPlan, ...]
    ignored: tuple[str, ...]
    faults: Faults
    kv_scales: Mapping[str, StoredTensor] = field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        return sum(tensor.num_elements for tensor in self.tensors)


def model_config_for(
    raw: Mapping[str, Any] | None, stored: Mapping[str, StoredTensor], *, hint: Family | None = None
) -> ModelConfig:
    """Returns the model's shape for the contents of config.json (None without one) and the names in the checkpoint. The
    names determine the family, because a released config may not mention it. Raises ConfigError if the config or
    ``hint``, the family that the model's name implies, contradicts the names."""
    raw = raw or {}
    found = detect_family(map_names(stored).tensors)
    if found is None:
        family = hint or family_of_config(raw)
        return parse_model_config(raw, family=family)
    if hint is not None and hint != found:
        raise ConfigError("model", hint, f"but the checkpoint holds the tensors of a {found} model")
    config = parse_model_config(raw, family=found)
    if found == "moondream2" and family_of_config(raw) == "moondream3":
        raise ConfigError(
            "config.json",
            "moondream3",
            "names Moondream 3, tau attention or experts, but the tensors are a Moondream 2 model's",
        )
    if found == "moondream3" and not config.text.tau_attn:
        raise ConfigError(
            "config.json", "tau_attn=false", "but the tensors are a Moondream 3 model's"
        )
    return config


def plan_checkpoint(stored: Mapping[str, StoredTensor], config: ModelConfig) -> CheckpointPlan:
    """Matches the stored tensors with those that ``config`` needs. ``faults`` lists what does not fit. Raises
    CheckpointError if two stored names mean the same tensor."""
    names = map_names(stored)
    expected = expected_tensors(config)
    missing: list[str] = []
    misshaped: list[str] = []
    details: dict[str, str] = {}
    plans: list[TensorPlan] = []
    used_scales: set[str] = set()
    for name, shape in expected.items():
        source = names.tensors.get(name)
        if source is None:
            if name not in OPTIONAL:
                missing.append(name)
            continue
        tensor = stored[source.stored]
        if source.part is TensorPart.INT4:
            found = names.groups.get(name, {})
            lacking = [f"{name}.{leaf}" for leaf in ("scale", "zero_point") if leaf not in found]
            if lacking:
                missing += lacking
                continue
            scales, zeros = stored[found["scale"]], stored[found["zero_point"]]
            if problem := _int4_problem(tensor, shape, scales, zeros):
                misshaped.append(name)
                details[name] = problem
            else:
                plans.append(TensorPlan(name, shape, tensor, source.part, scales, zeros))
            continue
        scale = None
        if tensor.is_float8:
            if name in names.scales:
                scale = stored[names.scales[name]]
                used_scales.add(name)
            else:
                missing.append(scale_name(name) if ".mlp." in name else f"FP8 scale of {name}")
                continue
        problem = _problem(tensor, source.part, shape, scale)
        if problem:
            misshaped.append(name)
            details[name] = problem
            continue
        plans.append(TensorPlan(name, shape, tensor, source.part, scale))
    unexpected = [
        *names.unknown,
        *dict.fromkeys(s.stored for name, s in names.tensors.items() if name not in expected),
        *(s for name, s in names.scales.items() if name not in used_scales),
        *(
            s
            for name, found in names.groups.items()
            if name not in expected
            or name not in names.tensors
            or names.tensors[name].part is not TensorPart.INT4
            for s in found.values()
        ),
    ]
    if names.prefix:
        details |= {name: f"{names.prefix}{name}" for name in missing if name in expected}
    order = {name: position for position, name in enumerate(stored)}
    plans.sort(key=lambda plan: order[plan.stored.name])
    return CheckpointPlan(
        tuple(plans),
        names.ignored,
        Faults(missing=missing, unexpected=unexpected, misshaped=misshaped, details=details),
        {name: stored[tensor] for name, tensor in names.kv_scales.items()},
    )


def checkpoint_error(where: str, faults: Faults, *, hint: str = "") -> CheckpointError:
    """Returns one error for all ``faults``. Its message lists the first names of each kind."""
    kinds = (
        ("missing", faults.missing),
        ("unexpected", faults.unexpected),
        ("misshaped", faults.misshaped),
        ("non-finite", faults.nonfinite),
    )
    parts = []
    for kind, found in kinds:
        if found:
            shown = ", ".join(faults.details.get(name, name) for name in found[:SHOWN])
            more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            parts.append(f"{len(found)} {kind}: {shown}{more}")
    return CheckpointError(
        f"{where} does not hold the tensors that the model needs; " + "; ".join(parts) + hint,
        missing=faults.missing,
        unexpected=faults.unexpected,
        misshaped=faults.misshaped,
        nonfinite=faults.nonfinite,
    )


def states_numbers(raw: Mapping[str, Any] | None) -> bool:
    """Returns whether the contents of config.json give the model's numbers. Those of a released model may not."""
    return bool(((raw or {}).get("config") or {}).get("text"))


def no_config_hint(raw: Mapping[str, Any] | None, config: ModelConfig) -> str:
    """Returns an addition to an error if the model's numbers had to be assumed, else an empty text."""
    if states_numbers(raw):
        return ""
    return f" (without a config.json, the released {config.family} shape was assumed)"


def _problem(
    tensor: StoredTensor, part: TensorPart, shape: tuple[int, ...], scale: StoredTensor | None
) -> str:
    wanted = shape
    if part is TensorPart.TRANSPOSED:
        wanted = shape[::-1]
    elif part in (TensorPart.FIRST_ROWS, TensorPart.LAST_ROWS):
        wanted = (2 * shape[0], *shape[1:])
    if tensor.shape != wanted:
        return f"{tensor.name} {list(tensor.shape)} instead of {list(wanted)}"
    if not tensor.is_float:
        return f"{tensor.name} of {tensor.dtype} instead of a floating-point type"
    if scale is not None and scale.shape != shape[:-1]:
        return f"{scale.name} {list(scale.shape)} instead of {list(shape[:-1])}"
    return ""


def _int4_problem(
    packed: StoredTensor, shape: tuple[int, ...], scale: StoredTensor, zero: StoredTensor
) -> str:
    """Two numbers in each byte of [..., rows, group], and a scale and a zero point for each group."""
    rows, group = packed.shape[-2:] if len(packed.shape) > 1 else (0, 1)
    outer = packed.shape[:-2]
    if (
        packed.dtype != "U8"
        or 2 * prod(packed.shape) != prod(shape)
        or outer not in ((), shape[:-2])
    ):
        return f"{packed.name} {list(packed.shape)} of {packed.dtype} instead of 4-bit numbers for {list(shape)}"
    for tensor in (scale, zero):
        if tensor.shape != (*outer, 2 * rows, 1) or not tensor.is_float:
            return (
                f"{tensor.name} {list(tensor.shape)} of {tensor.dtype} instead of "
                f"{[*outer, 2 * rows, 1]} for groups of {group}"
            )
    return ""
