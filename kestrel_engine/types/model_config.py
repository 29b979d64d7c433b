"""The shape of a Moondream model, read from config.json. Torch-free: scheduler, skills and service may look at it.

Released configs carry their numbers under ``config``, may leave any of them (or all) out, and spell the MoE keys in two
ways; the defaults are the released models' (moondream.md section 1). Prompt ids of other vocabularies come from
``config.tokenizer.templates``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, Literal, TypeVar

from ..errors import ConfigError

_Config = TypeVar("_Config")
Family = Literal["moondream2", "moondream3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture-of-experts MLPs from ``start_layer`` on; below it layers are dense."""

    start_layer: int = 4
    num_experts: int = 64
    experts_per_token: int = 8
    expert_inner_dim: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    dim: int = 2048
    ff_dim: int = 8192
    n_layers: int = 24
    n_heads: int = 32
    n_kv_heads: int = 32
    vocab_size: int = 51200
    max_context: int = 2048
    rope_theta: float = 10_000.0
    rotary_dim: int = 32
    tau_attn: bool = False
    moe: MoeConfig | None = None

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    enc_dim: int = 1152
    enc_patch_size: int = 14
    enc_n_layers: int = 27
    enc_ff_dim: int = 4304
    enc_n_heads: int = 16
    crop_size: int = 378
    in_channels: int = 3
    max_crops: int = 12
    """Limit on the tiles of an image, which an extreme shape exceeds."""
    overlap_margin: int = 4
    proj_inner_dim: int = 8192
    proj_out_dim: int = 2048
    budget: int = 0
    """The limit of a request, or of those that set none, in place of ``max_crops``. No shape exceeds it. 0: none."""

    def within(self, max_crops: int) -> VisionConfig:
        """The geometry of an image that a request sees in at most ``max_crops`` tiles; 0: as the model sees it."""
        return replace(self, budget=max_crops)

    @property
    def grid(self) -> int:
        """Patches on a side of a crop, and of the pooled image."""
        return self.crop_size // self.enc_patch_size

    @property
    def crop_window(self) -> int:
        """Distance from one crop's edge to the next one's, pixels: neighbours overlap by a margin of each."""
        return self.crop_size - 2 * self.overlap_margin * self.enc_patch_size

    def crop_boxes(self, tiling: tuple[int, int]) -> list[tuple[float, float, float, float]]:
        """Returns the place of each distinct crop in an image of ``tiling``, as (x_min, y_min, x_max, y_max) in [0, 1]:
        the overview, then the tiles row by row. A single tile equals the overview and is left out."""
        rows, columns = tiling
        boxes = [(0.0, 0.0, 1.0, 1.0)]
        if tiling == (1, 1):
            return boxes
        side, window = self.crop_size, self.crop_window
        width, height = window * (columns - 1) + side, window * (rows - 1) + side
        for top in range(0, window * rows, window):
            for left in range(0, window * columns, window):
                right, bottom = (left + side) / width, (top + side) / height
                boxes.append((left / width, top / height, right, bottom))
        return boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionConfig:
    dim: int = 2048
    coord_feat_dim: int = 256
    coord_out_dim: int = 1024
    size_feat_dim: int = 512
    size_out_dim: int = 2048
    inner_dim: int = 8192
    """Width of the MLP decoders; Moondream 2 only."""
    decoder: Literal["mlp", "linear"] = "mlp"
    """"mlp": two layers (Moondream 2). "linear": one, behind a shared LayerNorm (Moondream 3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """Prompt ids after BOS and image (moondream.md section 3)."""

    caption: Mapping[str, tuple[int, ...]]
    query_prefix: tuple[int, ...]
    query_suffix: tuple[int, ...]
    """Direct answer."""
    query_reasoning_suffix: tuple[int, ...]
    point_prefix: tuple[int, ...]
    point_suffix: tuple[int, ...]
    detect_prefix: tuple[int, ...]
    detect_suffix: tuple[int, ...]
    segment_prefix: tuple[int, ...] | None
    """None: the model can't segment."""
    segment_suffix: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialIds:
    bos_id: int = 0
    eos_id: int = 0
    answer_id: int = 3
    thinking_id: int = 4
    coord_id: int = 5
    size_id: int = 6
    start_ground_points_id: int = 7
    end_ground_id: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    family: Family
    text: TextConfig
    vision: VisionConfig
    region: RegionConfig
    ids: SpecialIds
    templates: Templates = field(repr=False)

    @property
    def image_positions(self) -> int:
        """KV positions of one image (729 in the released models)."""
        return self.vision.grid**2

    @property
    def image_prefix(self) -> int:
        """BOS plus image: the block that attends in both directions (730 in the released models)."""
        return 1 + self.image_positions

    @property
    def skills(self) -> tuple[str, ...]:
        base = ("query", "caption", "point", "detect")
        return base if self.templates.segment_prefix is None else (*base, "segment")


def parse_model_config(raw: Mapping[str, Any], *, family: Family | None = None) -> ModelConfig:
    """Reads the contents of config.json; absent numbers take the family's released values.

    ``family`` overrides detection (by tau attention, MoE or the declared type). Raises ConfigError for numbers that do
    not fit together, and for values of another type.
    """
    inner = _object("config", raw)
    family = family or detect_family(raw)
    md3 = family == "moondream3"
    text_raw = dict(_object("text", inner))
    moe_raw = _object("moe", text_raw)
    moe = _moe(moe_raw) if (md3 or moe_raw) else None
    text_defaults: dict[str, Any] = (
        {"max_context": 32768, "rope_theta": 1_500_000.0, "tau_attn": True} if md3 else {}
    )
    text = _fill(TextConfig, "text", {**text_defaults, **_present(text_raw)}, moe=moe)
    vision = _fill(VisionConfig, "vision", _present(_object("vision", inner)), budget=0)
    decoder = "linear" if md3 else "mlp"
    region = _fill(
        RegionConfig, "region", {"decoder": decoder, **_present(_object("region", inner))}
    )
    tokenizer_raw = _object("tokenizer", inner)
    ids = _fill(SpecialIds, "tokenizer", _present(tokenizer_raw))
    templates = _templates(_object("templates", tokenizer_raw), family, ids, text.vocab_size)
    config = ModelConfig(
        family=family, text=text, vision=vision, region=region, ids=ids, templates=templates
    )
    _check(config, text_raw.get("prefix_attn"))
    return config


def detect_family(raw: Mapping[str, Any]) -> Family:
    """moondream3 if config.json says so by type, tau attention or experts; else moondream2."""
    text = _object("text", _object("config", raw))
    declared = f"{raw.get('model_type')} {raw.get('architectures')}".lower()
    if text.get("tau_attn") or text.get("moe") or "moondream3" in declared:
        return "moondream3"
    return "moondream2"


def _moe(raw: Mapping[str, Any]) -> MoeConfig:
    aliases = {"n_experts": "num_experts", "n_experts_per_tok": "experts_per_token"}
    return _fill(MoeConfig, "text.moe", _present({aliases.get(k, k): v for k, v in raw.items()}))


def _object(key: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object at ``key``; empty if there is none. Raises ConfigError."""
    value = raw.get(key)
    if not isinstance(value, Mapping | None):
        raise ConfigError(key, _shown(value), "must be an object")
    return value or {}


def _present(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if v is not None}


_MAY_BE_ZERO = ("overlap_margin", "start_layer", *(each.name for each in fields(SpecialIds)))
_MOST = (1 << 31) - 1
_DECODERS = ("mlp", "linear")


def _fill(cls: type[_Config], place: str, raw: Mapping[str, Any], **fixed: Any) -> _Config:
    """Fills the fields of ``cls`` from ``raw``, which stands at ``place``. Raises ConfigError for a wrong type."""
    found = {}
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name in raw and each.name not in fixed:
            value = raw[each.name]
            if problem := _problem(each.name, each.default, value):
                raise ConfigError(f"{place}.{each.name}", _shown(value), problem)
            found[each.name] = value
    return cls(**found, **fixed)


def _problem(name: str, default: object, value: object) -> str:
    """What is wrong with a number, a flag or a name whose default is ``default``; "" if nothing is."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "must be true or false"
    if isinstance(default, str):
        return "" if value in _DECODERS else f"must be one of {', '.join(_DECODERS)}"
    if isinstance(default, float) and isinstance(value, float):
        return "" if 0 < value and isfinite(value) else "must be above 0"
    least = 0 if name in _MAY_BE_ZERO else 1
    return (
        "" if _is_id(value, _MOST + 1, least) else f"must be a whole number from {least} to {_MOST}"
    )


def _is_id(value: object, limit: int, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < limit


def _shown(value: object) -> object:
    text = repr(value)
    return value if len(text) <= 80 else f"{text[:80]}…"


def _templates(
    raw: Mapping[str, Any], family: Family, ids: SpecialIds, vocab_size: int
) -> Templates:
    answer, thinking = ids.answer_id, ids.thinking_id
    caption: dict[str, tuple[int, ...]] = {
        "short": (1, 32708, 2, 12492, 3),
        "normal": (1, 32708, 2, 6382, 3),
        "long": (1, 32708, 2, 4059, 3),
    }
    # Moondream 2's doubled answer id is the reference's own: the suffix is added once always, and once more for direct
    # answers.
    suffix, reasoning = (
        ((answer,), (thinking,))
        if family == "moondream3"
        else ((answer, answer), (answer, thinking))
    )

    def ids_of(skill: str, part: str, default: tuple[int, ...]) -> tuple[int, ...]:
        value = _object(skill, raw).get(part)
        return default if value is None else checked(f"{skill}.{part}", value)

    def checked(place: str, value: object) -> tuple[int, ...]:
        if not (isinstance(value, list) and all(_is_id(each, vocab_size) for each in value)):
            raise ConfigError(
                f"tokenizer.templates.{place}",
                _shown(value),
                f"must be a list of ids below {vocab_size}",
            )
        return tuple(value)

    if "caption" in raw:
        lengths = _object("caption", raw)
        caption = {key: checked(f"caption.{key}", value) for key, value in lengths.items()}
    segment: tuple[int, ...] | None = (1, 17374, 2) if family == "moondream3" else None
    if raw:
        segment = ids_of("segment", "prefix", ()) or None
    return Templates(
        caption=caption,
        query_prefix=ids_of("query", "prefix", (1, 15381, 2)),
        query_suffix=suffix,
        query_reasoning_suffix=reasoning,
        point_prefix=ids_of("point", "prefix", (1, 2581, 2)),
        point_suffix=ids_of("point", "suffix", (answer,)),
        detect_prefix=ids_of("detect", "prefix", (1, 7235, 476, 2)),
        detect_suffix=ids_of("detect", "suffix", (answer,)),
        segment_prefix=segment,
        segment_suffix=ids_of("segment", "suffix", (answer,)),
    )


def _check(config: ModelConfig, prefix_attn: object) -> None:
    text, vision, region = config.text, config.vision, config.region

    def require(rule: bool, field: str, value: object, problem: str) -> None:
        if not rule:
            raise ConfigError(field, value, problem)

    dim, heads, multiple = text.dim, text.n_heads, "must be a multiple of"
    require(dim % heads == 0, "text.dim", dim, f"{multiple} text.n_heads={heads}")
    kv_heads = text.n_kv_heads
    require(kv_heads == heads, "text.n_kv_heads", kv_heads, f"must equal text.n_heads={heads}")
    enc_dim, enc_heads = vision.enc_dim, vision.enc_n_heads
    require(enc_dim % enc_heads == 0, "vision.enc_dim", enc_dim, f"{multiple} {enc_heads} heads")
    crop, patch = vision.crop_size, vision.enc_patch_size
    require(crop % patch == 0, "vision.crop_size", crop, f"{multiple} {patch}")
    margin, window = vision.overlap_margin, f"must leave a window of grid {vision.grid}"
    require(vision.grid > 2 * margin, "vision.overlap_margin", margin, window)
    out_dim = vision.proj_out_dim
    same = out_dim == region.dim == dim
    require(same, "vision.proj_out_dim", out_dim, f"must equal text.dim={dim}")
    bins = region.size_out_dim
    require(bins % 2 == 0, "region.size_out_dim", bins, "must be even: width and height bins")
    prefix = config.image_prefix
    if prefix_attn is not None:
        problem = f"must be 1 + grid squared = {prefix}"
        require(prefix_attn == prefix, "text.prefix_attn", prefix_attn, problem)
    if text.moe is not None:
        active, most = text.moe.experts_per_token, text.moe.num_experts
        require(1 <= active <= most, "text.moe.experts_per_token", active, f"must be 1..{most}")
    lengths, problem = sorted(config.templates.caption), "needs short, normal, long"
    require(lengths == ["long", "normal", "short"], "tokenizer.templates.caption", lengths, problem)
