"""What an adapter says about itself, in PEFT's description or in the metadata of its file: the factor of each change.

PEFT's methods beside plain LoRA compute something else, or change the base weights, which are not in the file. So a key
must be known here, or have a value that PEFT uses for "off". The keys are those of PEFT 0.21.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..checkpoint.files import StoredTensor
from ..errors import CheckpointError
from .references import shortened

CONFIG_NAME = "adapter_config.json"
"""PEFT's description of an adapter, beside its tensors."""

_READ = {
    *("alpha_pattern", "exclude_modules", "init_lora_weights", "layers_to_transform", "lora_alpha"),
    *("peft_type", "r", "rank_pattern", "target_modules", "use_rslora"),
}
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
    "layers_pattern",  # names the list of layers that layers_to_transform counts
}
_KNOWN_VALUES = {"bias": "none"}
"""Further values that stand for "off"."""
_ONLY_IF_OFF = (
    *("alora_invocation_tokens", "arrow_config", "bias", "corda_config", "ensure_weight_tying"),
    *("eva_config", "fan_in_fan_out", "kasa_config", "layer_replication", "loftq_config"),
    *("lora_bias", "lora_ga_config", "megatron_config", "modules_to_save", "monteclora_config"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora"),
    "velora_config",
)
"""Keys that are refused in metadata too, where other keys mean nothing."""
_INITIAL = (None, True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the base weights as they are. pissa, olora, corda, loftq and others do not."""
_ALPHA = 8
"""PEFT's default."""
_LITERAL = re.compile(r"\^?[\w.\\-]+\$?")
_LAYER = re.compile(r"\.(\d+)\.")
_WORDS = {"true": True, "false": False, "none": None, "null": None, "": None}


class Sides(NamedTuple):
    a: StoredTensor
    b: StoredTensor


def scales(
    described: Mapping[str, Any], pairs: Mapping[str, Sides], *, is_peft: bool
) -> dict[str, float]:
    """Returns the factor of each module's B: alpha / rank, or alpha / sqrt(rank) with use_rslora; 1 without an alpha.
    ``described``: PEFT's description with ``is_peft``, else the metadata of a file, whose values are texts and whose
    other keys mean nothing. Raises CheckpointError for a computation that is not supported, naming the key.
    """
    if not is_peft:
        described = {key: _value_of(value) for key, value in described.items()}
        described = {"lora_alpha": described.get("alpha"), "r": described.get("rank"), **described}
    _check(described, is_peft)
    alpha, rank = described.get("lora_alpha"), described.get("r")
    if alpha is None and not is_peft:
        return dict.fromkeys(pairs, 1.0)
    alpha = _number("alpha", _ALPHA if alpha is None else alpha)
    ranks = {module: a.shape[-2] for module, (a, _) in pairs.items()}
    if rank is not None:
        rank = _number("rank", rank)
    elif len(set(ranks.values())) > 1:
        several = sorted(set(ranks.values()))
        raise CheckpointError(f"has an alpha and ranks {several}, but does not name its rank")
    is_stabilised = bool(described.get("use_rslora"))
    found = {}
    for module, (a, _) in pairs.items():
        name = _peft_name(a.name)
        _check_selected(name, described)
        own = _of_pattern("rank_pattern", described, name, ranks[module] if rank is None else rank)
        # The metadata of an adapter of experts names the rank of its dense layers.
        if own != ranks[module] and (is_peft or len(a.shape) == 2):
            raise CheckpointError(f"r is {own:g} for {name}, but {a.name} has rank {ranks[module]}")
        factor = _of_pattern("alpha_pattern", described, name, alpha)
        found[module] = factor / (math.sqrt(own) if is_stabilised else own)
    return found


def _check(described: Mapping[str, Any], is_peft: bool) -> None:
    """Raises CheckpointError for a key that changes the computation in a way that this engine does not know."""
    if described.get("peft_type", "LORA") != "LORA":
        raise CheckpointError(f"{CONFIG_NAME}: peft_type must be LORA")
    initial = described.get("init_lora_weights")
    if not any(initial is each or initial == each for each in _INITIAL):
        raise CheckpointError(
            f"init_lora_weights {shortened(initial)} is not supported: it may change the base weights; convert the "
            "adapter to plain LoRA when you save it (path_initial_model_for_weight_conversion of PEFT)"
        )
    keys = set(described) - _READ - _WITHOUT_EFFECT if is_peft else _ONLY_IF_OFF
    for key in sorted(keys):
        value = described.get(key)
        if value and value != _KNOWN_VALUES.get(key):
            raise CheckpointError(f"{CONFIG_NAME}: {shortened(key)} is not supported")


def _check_selected(name: str, described: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a tensor of a module that the description leaves out: PEFT would not apply it."""
    layers = described.get("layers_to_transform")
    layer = _LAYER.search(f".{name}.")
    if layers is not None and layer is not None:
        chosen = layers if isinstance(layers, list) else [layers]
        if int(layer[1]) not in chosen:
            raise CheckpointError(f"layers_to_transform leaves out {name}, but the file changes it")
    for key, is_wanted in (("target_modules", True), ("exclude_modules", False)):
        names = described.get(key)
        # A text is a regular expression, and it is the file's tensors that show what it has selected.
        if isinstance(names, list) and (names or not is_wanted):
            if any(name == each or name.endswith(f".{each}") for each in names) != is_wanted:
                raise CheckpointError(f"{key} leaves out {name}, but the file changes it")


def _peft_name(stored: str) -> str:
    """The name of a tensor's module, as PEFT matches it."""
    return stored.removeprefix("base_model.model.").rpartition(".lora_")[0] or stored


def _of_pattern(key: str, described: Mapping[str, Any], name: str, default: float) -> float:
    """The value of the first pattern that is the end of ``name``, else ``default``. Raises CheckpointError for patterns
    that are no plain names: a regular expression may take any time."""
    patterns = described.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{key} must be a JSON object")
    for pattern, value in patterns.items():
        if _LITERAL.fullmatch(pattern) is None:
            raise CheckpointError(
                f"{key}: {shortened(pattern)} is a regular expression; only names of modules are supported"
            )
        plain = pattern.replace("\\", "").removesuffix("$")
        if name == plain.removeprefix("^") or name.endswith(f".{plain}"):
            return _number(key, value)
    return default


def _value_of(text: object) -> object:
    """The value of a text in the metadata, all of whose values are texts."""
    word = str(text).strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _number(name: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < 1e6:
        raise CheckpointError(
            f"{name} is {shortened(value)}; expected a number above 0 and below 1e6"
        )
    return number
