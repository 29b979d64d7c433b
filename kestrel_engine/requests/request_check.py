"""RequestCheck: what the skill makes of a request, before anything is computed for it.

Owns the skills, and the defaults that they take from the engine's settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..adapters.references import checked_adapter_name
from ..building.factory import Built
from ..config.runtime import RuntimeConfig
from ..errors import ContextLengthError, InvalidRequest, RequestError
from ..preprocess.looks import Tiled
from ..preprocess.tokenizer import LONG_TEXT
from ..skills.base import SkillContext, SkillDefaults, SkillRequest, SkillSpec
from ..skills.objects.request import ObjectsRequest
from ..skills.prompts import check_context, check_images, num_positions
from ..skills.registry import SkillRegistry
from ..skills.rule_check import check_prompt
from ..types.requests import Coord, PreparedTiles
from .request import Request
from .seeds import Seeds


def has_long_text(request: Request) -> bool:
    """Whether the check of a request may take a millisecond or more, because it encodes a long text."""
    arguments = request.arguments
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

    def __init__(
        self, config: RuntimeConfig, built: Built, skills: SkillRegistry, seeds: Seeds
    ) -> None:
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
                draw_seed=seeds.draw,
            ),
            refines=built.runtime.limits.refines,
            calibration=built.calibration,
        )
        """What skills know of the engine."""

    def skill(self, request: Request) -> SkillSpec[Any]:
        """Raises SkillUnavailable."""
        return self._skills.get(request.skill)

    def check(self, request: Request) -> SkillRequest:
        """What the skill makes of a request that fits the model's context. Raises RequestError."""
        checked, images = self.made(request), request.images
        positions = 0
        if checked.reads is None:
            positions = check_context(checked, len(images), self._model, self._max_positions)
        limit = token_limit(
            checked,
            positions,
            context=self._max_positions,
            most=self._config.max_new_tokens,
            default=self.context.defaults.max_tokens,
        )
        return replace(checked, token_limit=limit)

    def made(self, request: Request) -> SkillRequest:
        """What the skill makes of a request of any length. Raises RequestError."""
        spec = self.skill(request)
        if request.adapter is not None:
            checked_adapter_name(request.adapter)
        checked: SkillRequest = spec.build(request.arguments, request.settings, self.context)
        check_prompt(checked.prompt_suffix, self._model)
        _check_tiled(request.images, checked)
        check_images(checked, len(request.images), self._config.max_images)
        return checked

    def positions(self, checked: SkillRequest, num_images: int) -> int:
        """The positions of the prompt of one look at ``num_images`` images; 0 if nothing is generated."""
        return 0 if checked.reads is not None else num_positions(checked, num_images, self._model)


def num_looks(request: Request) -> int:
    """How often a request looks at its images."""
    return sum(
        image.tiles.num_looks
        if isinstance(image, Tiled)
        else len(image.looks)
        if isinstance(image, PreparedTiles)
        else 1
        for image in request.images
    )


def _check_tiled(images: Sequence[Any], checked: SkillRequest) -> None:
    """Raises InvalidRequest."""
    for image in images:
        if not isinstance(image, (Tiled, PreparedTiles)):
            continue
        if len(images) > 1:
            raise InvalidRequest("tiles", f"are for one image; the request has {len(images)}")
        if not isinstance(checked, ObjectsRequest):
            raise InvalidRequest(
                "tiles", f"are for skills that find objects; {checked.skill} looks at an image once"
            )
        if any(isinstance(token, Coord) for token in checked.prompt_suffix):
            raise InvalidRequest(
                "spatial_refs", "must be empty for a tiled image: a tile may not show the places"
            )


def token_limit(
    request: SkillRequest, positions: int, *, context: int, most: int | None, default: int
) -> int:
    """Returns the most tokens to sample. A limit of the request that exceeds the room is an error; a default shrinks.

    ``positions``: of the prompt. ``context``: positions of a sequence. ``most``: the engine's limit on the tokens of a
    request. ``default``: the default of max_tokens. Raises ContextLengthError, InvalidRequest.
    """
    room = context - positions
    fitting = min(room, most or room) - request.tokens_ahead
    for field, needed, shown in request.token_limits:
        error: RequestError
        if needed > room:
            error = ContextLengthError(
                field,
                f"{shown} exceeds the {room} positions left after a prompt of {positions} in a context of {context}",
                value=needed,
                limit=room,
            )
        elif most is not None and needed > most:
            error = InvalidRequest(
                field, f"{shown} exceeds this engine's limit of {most}", value=needed, limit=most
            )
        else:
            continue
        if request.max_tokens is not None and fitting >= 1:
            error.most_tokens = fitting
        raise error
    return min(request.token_budget or request.max_tokens or default, room, most or room)
