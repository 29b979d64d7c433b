"""The prompt of a request: BOS, the images, and the skill's tokens. Owns no state."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ContextLengthError, InvalidRequest, SkillFault
from ..types.model_config import ModelConfig
from ..types.requests import IMAGE_PLACE, ImageBlock, ImagePlace, PreparedImage, Prompt, Token
from .base import SkillRequest


def check_images(request: SkillRequest, count: int, max_images: int) -> None:
    """Checks that the skill and the engine take ``count`` images in one request. Raises InvalidRequest."""
    if not count and request.needs_image:
        raise InvalidRequest("image", "is required")
    if request.num_images is not None and count != request.num_images:
        raise InvalidRequest(
            "images", f"are {count}; the skill's arguments are about {request.num_images}"
        )
    if request.max_images is not None and count > request.max_images:
        raise InvalidRequest(
            "images", f"are {count}; {request.skill} takes at most {request.max_images}"
        )
    if count > max_images:
        raise InvalidRequest(
            "images",
            f"are {count}; the limit is {max_images} in a request",
            value=count,
            limit=max_images,
        )
    places = request.prompt_suffix.count(IMAGE_PLACE)
    if places > count:
        raise SkillFault(f"the skill's prompt has {places} places for {count} images")


def num_positions(request: SkillRequest, count: int, model: ModelConfig) -> int:
    """The positions of the prompt with ``count`` images."""
    text = 1 + len(request.prompt_suffix) - request.prompt_suffix.count(IMAGE_PLACE)
    return text + count * model.image_positions


def check_context(request: SkillRequest, count: int, model: ModelConfig, context: int) -> int:
    """The positions of the prompt with ``count`` images. Raises ContextLengthError unless ``context`` positions hold
    them and one more."""
    positions = num_positions(request, count, model)
    text = positions - count * model.image_positions
    if positions < context:
        return positions
    if count > 1 and text < context:
        fitting = (context - text - 1) // model.image_positions
        raise ContextLengthError(
            "images",
            f"take {count * model.image_positions} positions ({count} of {model.image_positions} each) and the text "
            f"{text}; the context has {context}: send at most {fitting} with this text",
            value=count,
            limit=fitting,
        )
    raise ContextLengthError(
        request.prompt_field,
        f"the prompt takes {positions} positions; the context has {context}: send less text or fewer "
        "spatial references",
        value=positions,
        limit=context,
    )


def build_prompt(
    request: SkillRequest, images: Sequence[PreparedImage], model: ModelConfig
) -> Prompt:
    """The prompt with the images at their places; those without a place follow BOS."""
    blocks = [ImageBlock(image.key, model.image_positions) for image in images]
    suffix = request.prompt_suffix
    num_first = len(blocks) - suffix.count(IMAGE_PLACE)
    prompt: list[Token] = [model.ids.bos_id, *blocks[:num_first]]
    later = iter(blocks[num_first:])
    prompt += [next(later) if isinstance(t, ImagePlace) else t for t in suffix]
    return tuple(prompt)
