"""RequestSettings: the limits and the defaults of requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..confinement import MODES
from .groups import REQUESTS
from .image_limits import ImageLimits
from .setting import checked


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    max_batch_size: int | None = REQUESTS.setting(
        None,
        "limit on the requests that one step computes together",
        low=1,
        high=4096,
        shown="16, on CUDA 64",
    )
    max_seq_length: int | None = REQUESTS.setting(
        None,
        "limit on the positions of one request: image, prompt and answer together",
        low=2,
        shown="the model's context",
    )
    max_queue: int = REQUESTS.setting(
        512,
        "limit on the requests that wait, including requests in preprocessing; further ones get RESOURCE_EXHAUSTED",
        low=1,
    )
    max_crops: int | None = checked(None, low=1)
    """Limit on the tiles in which the model sees an image whose request sets no max_crops; 1: the overview alone. None:
    the model's own, or for a large model on a CPU what `building.cpu_choice` chooses."""
    max_images: int = checked(16, low=1, high=64)
    """Limit on the images of one request; the model's context limits them further. Moondream 2 holds two images,
    Moondream 3 five, kestrel-small three."""
    max_queued_pixels: int = checked(4_000_000_000, low=1)
    """Limit on the pixels of all images that wait to be decoded. A decoder decodes about 100 million pixels a
    second."""
    decode_bytes: int = checked(1024 * 1024 * 1024, low=64 * 1024 * 1024)
    """Limit on the memory of all images that are being decoded, together. Cheap images, one in each decoder, use at
    most half. An expensive image waits until it fits into the rest."""
    decode_timeout_s: float = checked(30.0, above=0)
    """Limit on the time to decode one image; beyond it, the request gets INVALID_ARGUMENT."""
    confine: str = REQUESTS.setting(
        "auto",
        "confine the processes that decode images and compile constraints: with all that the kernel offers (auto), or "
        "not at all (off); require: do not start without Landlock and seccomp",
        choices=MODES,
    )
    max_queue_wait_s: float | None = REQUESTS.setting(
        None,
        "limit on the time that a request waits; beyond it, the request gets RESOURCE_EXHAUSTED",
        above=0,
        shown="the caller's deadline",
    )
    max_new_tokens: int | None = REQUESTS.setting(
        None,
        "limit on the tokens of one answer, including its reasoning; a request with a larger max_tokens is refused",
        low=1,
        shown="the room that is left in the context",
    )
    default_max_tokens: int = REQUESTS.setting(
        768,
        "limit on the tokens of an answer if its request does not set max_tokens",
        flag="--default-max-new-tokens",
        low=1,
    )
    """If the context has less room left, that room is the limit."""
    max_text_bytes: int = checked(32 * 1024 - 1, low=1)
    """Limit on the UTF-8 bytes of a question or an object's name."""
    image_limits: ImageLimits = field(default_factory=ImageLimits)
    default_temperature: float = checked(0.2, low=0)
    """For query and caption; point, detect and segment are greedy."""
    default_top_p: float = checked(0.9, above=0, high=1)
    """For query and caption."""
    default_max_objects: int = checked(150, low=1)
    """For point and detect."""
    min_score: float = REQUESTS.setting(
        0.0,
        "least score of a point, a box or a segment that is returned, unless the request sets its own; 0 returns all",
        metavar="SCORE",
        low=0,
        high=1,
    )
    max_absence: float = REQUESTS.setting(
        0.5,
        "the server does not answer a question if an object that it presupposes is absent with a probability above "
        "this; a request may set its own limit; 1 answers all",
        metavar="P",
        low=0,
        high=1,
    )
