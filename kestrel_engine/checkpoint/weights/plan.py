"""From what is stored to what is needed: which stored tensor makes which canonical one, and what doesn't fit.

Works on names, shapes and dtypes alone: no values, no torch.
"""

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
from .names import Part, detect_family, map_names, scale_name

SHOWN = 10
"""Names of one kind that an error message lists; its attributes hold all."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One canonical tensor: its shape, the stored tensor and the part of it, and the FP8 scale if there is one."""

    name: str
    shape: tuple[int, ...]
    stored: StoredTensor
    part: Part
    scale: StoredTensor | None = None

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Faults:
    """What keeps a checkpoint from being loaded. ``details`` says for a name what is wrong, beyond the name."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    misshaped: Sequence[str] = ()
    nonfinite: Sequence[str] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshaped or self.nonfinite)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """``tensors`` in the order of the files' data. ``ignored``: stored names that are not needed. ``kv_scales``: by
    `names.kv_scale_name`, those that there are; `kv_scales.read` checks them where they are wanted."""

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
    """The model's shape from config.json's contents (None: there is none) and the names in the checkpoint.

    The names decide the family, because released configs may say nothing about it; numbers come from the config. Raises
    ConfigError when config or ``hint`` (the family of a model asked for by name) say otherwise.
    """
    raw = raw or {}
    found = detect_family(map_names(stored).tensors)
    if found is None:
        family = hint or family_of_config(raw)
        return parse_model_config(raw, family=family)
    if hint is not None and hint != found:
        raise ConfigError("model", hint, f"but the checkpoint holds the tensors of a {found} model")
    text = (raw.get("config") or {}).get("text") or {}
    if found == "moondream2" and family_of_config(raw) == "moondream3":
        raise ConfigError(
            "config.json",
            "moondream3",
            "it names Moondream 3, tau attention or experts, but the tensors are a Moondream 2 model's",
        )
    if found == "moondream3" and text.get("tau_attn") is False:
        raise ConfigError(
            "config.json", "tau_attn=false", "but the tensors are a Moondream 3 model's"
        )
    return parse_model_config(raw, family=found)


def plan_checkpoint(stored: Mapping[str, StoredTensor], config: ModelConfig) -> CheckpointPlan:
    """Matches stored tensors with the ones that ``config`` needs; what does not fit is in ``faults``.

    Raises CheckpointError when two stored names mean the same tensor, or for a format that we can't read.
    """
    if any(name.endswith(".weight.packed") for name in stored):
        raise CheckpointError("this checkpoint is quantised to 4 bits, which can't be loaded")
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
    """One error for all that was found; its message shows the first names of each kind."""
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
    """Whether config.json's contents give the model's numbers; released ones may not."""
    return bool(((raw or {}).get("config") or {}).get("text"))


def no_config_hint(raw: Mapping[str, Any] | None, config: ModelConfig) -> str:
    """What to add to an error when the model's numbers had to be assumed."""
    if states_numbers(raw):
        return ""
    return f" (no config.json gives the model's numbers: the released {config.family} shape was assumed)"


def _problem(
    tensor: StoredTensor, part: Part, shape: tuple[int, ...], scale: StoredTensor | None
) -> str:
    wanted = shape
    if part is Part.TRANSPOSED:
        wanted = shape[::-1]
    elif part in (Part.FIRST_ROWS, Part.LAST_ROWS):
        wanted = (2 * shape[0], *shape[1:])
    if tensor.shape != wanted:
        return f"{tensor.name} {list(tensor.shape)} instead of {list(wanted)}"
    if not tensor.is_float:
        return f"{tensor.name} of {tensor.dtype} instead of a floating-point type"
    if scale is not None and scale.shape != shape[:-1]:
        return f"{scale.name} {list(scale.shape)} instead of {list(shape[:-1])}"
    return ""
