"""What a request would take of the model's context, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .._pb.kestrel.v1 import vision_service_pb2 as pb
from ..geometry import ImageSize, read_size
from .plain import Plain
from .reading import read


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTokens:
    """The positions that a task would take."""

    num_prompts: int
    """One for each name or sample, each look at a tiled image, each look for a gaze, and each image and presupposed
    object. Without eyes and faces, a gaze task has one prompt: the search for faces."""
    input_tokens: int
    """Positions of all these prompts: ``usage.input_tokens`` of the task's result. The task uses fewer if it abstains
    from an answer, and more if it looks at faces that the model finds."""
    image_tokens: int
    """The part of input_tokens that images take."""
    system_tokens: int
    """The part of input_tokens that ``system`` takes."""
    longest_prompt_tokens: int
    """Positions of the longest prompt."""
    room_tokens: int
    """Positions that the longest prompt leaves for its answer; 0: the server would refuse the task."""
    num_crops: int
    """Crops of the images that the task looks at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """What an image would take."""

    size: ImageSize
    """Width and height of the upright image in pixels."""
    positions: int
    """Positions in each prompt with the image; they do not depend on its size."""
    num_crops: int
    """Crops that the vision tower would read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount(Plain):
    """The positions of the model's context that tasks would take."""

    input_tokens: int
    """Positions of the prompts of all tasks: the sum over ``tasks``."""
    image_tokens: int
    """The part of input_tokens that images take."""
    context_positions: int
    """Largest number of positions of one prompt with its answer."""
    tasks: Mapping[str, TaskTokens]
    """By the key of the task, in their order."""
    images: tuple[ImageTokens, ...]
    model: str
    """Name of the model that counted."""
    request_id: str

    @property
    def room_tokens(self) -> int:
        """Positions that the longest prompt of all tasks leaves for its answer."""
        return min(task.room_tokens for task in self.tasks.values())


def token_count(response: pb.CountTokensResponse) -> TokenCount:
    return read(
        TokenCount,
        response,
        tasks={task.key: read(TaskTokens, task) for task in response.tasks},
        images=tuple(
            read(ImageTokens, image, size=read_size(image.size)) for image in response.images
        ),
        model=response.info.model,
        request_id=response.info.request_id,
    )
