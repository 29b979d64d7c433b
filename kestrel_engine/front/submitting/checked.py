"""RequestCheck: from the arguments of a request to a CheckedRequest, before anything is computed for it. Owns the
skills, and the defaults that they take from the engine's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...adapters.references import checked_adapter_name
from ...building.factory import Built
from ...config.runtime import RuntimeConfig
from ...errors import InvalidRequest
from ...preprocess.looks import Tiled
from ...preprocess.tokenizer import LONG_TEXT
from ...skills.base import SkillContext, SkillDefaults, SkillRequest, SkillSpec
from ...skills.embed import EMBED, EmbedSkill
from ...skills.prompts import check_context, check_images
from ...skills.registry import SkillRegistry
from ...skills.rule_check import check_prompt
from ...types.requests import Coord, PreparedTiles
from .token_limit import token_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a caller asks of ``InferenceEngine.submit``."""

    skill: str
    image: Any
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    request_id: str
    accepted_at: float
    deadline_at: float | None
    """After this instant nothing is begun for the request. All of its stages share it."""
    cache_salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """``num_looks``: those at its image, 1 unless it is tiled. ``max_tokens``: most tokens to sample."""

    spec: SkillSpec
    request: SkillRequest
    images: list[Any]
    num_looks: int
    max_tokens: int
    adapter: str | None
    """The name of the adapter, if the request names one."""


def has_long_text(asked: Asked) -> bool:
    """Whether the check of a request may take a millisecond or more, because it encodes a long text."""
    arguments = asked.arguments
    return (
        isinstance(arguments, Mapping) and _num_characters(list(arguments.values()), 3) >= LONG_TEXT
    )


def _num_characters(values: Sequence[Any], depth: int) -> int:
    """The characters of the texts in ``values`` and in its lists down to ``depth``, as far as a long text needs."""
    total = 0
    for value in values:
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, (list, tuple)) and depth > 1:
            total += _num_characters(value, depth - 1)
        if total >= LONG_TEXT:
            break
    return total


class RequestCheck:
    """Knows what the model, the settings and the skills allow."""

    def __init__(self, config: RuntimeConfig, built: Built, skills: SkillRegistry) -> None:
        self._config = config
        self._skills = skills
        self._model = built.model
        self._max_positions = built.runtime.limits.max_seq_length
        self.context = SkillContext(
            model=built.model,
            codec=built.codec,
            defaults=SkillDefaults(
                max_tokens=config.default_max_tokens,
                temperature=config.default_temperature,
                top_p=config.default_top_p,
                max_objects=config.default_max_objects,
                min_score=config.min_score,
                max_absence=config.max_absence,
                max_text_bytes=config.max_text_bytes,
            ),
            refines=built.runtime.limits.refines,
            calibration=built.calibration,
        )
        """What skills know of the engine."""

    def check(self, asked: Asked) -> CheckedRequest:
        """Raises RequestError."""
        embeds = asked.skill == EMBED
        spec: SkillSpec = EmbedSkill() if embeds else self._skills.get(asked.skill)
        adapter, settings = _without_adapter(asked.settings)
        request = spec.build(asked.arguments, settings, self.context)
        check_prompt(request.prompt_suffix, self._model)
        images = _as_list(asked.image)
        num_looks = _check_tiled(images, request)
        check_images(request, len(images), self._config.max_images)
        positions = 0
        if request.embedding is None:
            positions = check_context(request, len(images), self._model, self._max_positions)
        max_tokens = token_limit(
            request,
            positions,
            context=self._max_positions,
            most=self._config.max_new_tokens,
            default=self.context.defaults.max_tokens,
        )
        return CheckedRequest(
            spec=spec,
            request=replace(request, token_limit=max_tokens),
            images=images,
            num_looks=num_looks,
            max_tokens=max_tokens,
            adapter=adapter,
        )


def _without_adapter(settings: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The name of the adapter, if there is one, and the settings for the skill. Raises InvalidRequest."""
    if not isinstance(settings, Mapping) or "adapter" not in settings:
        return None, settings
    name = settings["adapter"]
    if name is not None:
        name = checked_adapter_name(name)
    return name, {key: value for key, value in settings.items() if key != "adapter"}


def _as_list(image: Any) -> list[Any]:
    """The images of a request."""
    if isinstance(image, (list, tuple)):
        return list(image)
    return [] if image is None else [image]


def _check_tiled(images: Sequence[Any], request: SkillRequest) -> int:
    """The number of looks at an image of the request: 1 unless it is tiled. Raises InvalidRequest."""
    for image in images:
        if not isinstance(image, (Tiled, PreparedTiles)):
            continue
        if len(images) > 1:
            raise InvalidRequest("tiles", f"are for one image; the request has {len(images)}")
        if request.merging is None:
            raise InvalidRequest(
                "tiles", f"are for skills that find objects; {request.skill} looks at an image once"
            )
        if any(isinstance(token, Coord) for token in request.prompt_suffix):
            raise InvalidRequest(
                "spatial_refs", "must be empty for a tiled image: a tile may not show the places"
            )
        return image.tiles.num_looks if isinstance(image, Tiled) else len(image.looks)
    return 1
