"""EngineInfo: what a running engine is, in plain values, for callers, ModelService and logs."""

from __future__ import annotations

from dataclasses import dataclass

from .model_config import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """Seconds that parts of loading took, one after the other. 0: there was no such part."""

    weights_s: float = 0.0
    """Reading and placing tensors."""
    build_s: float = 0.0
    """Packing them, and the KV pool."""
    capture_s: float = 0.0
    """Capturing CUDA graphs, and compiling the kernels in them that were not compiled yet."""
    warm_up_s: float = 0.0
    """The first requests, and compiling the other kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCounts:
    """Kernels that were made ready since the process began, and the seconds that this took."""

    compiled: int = 0
    cached: int = 0
    """Found compiled on the disk."""
    seconds: float = 0.0


@dataclass(slots=True)
class MaskCounts:
    """The work of following constraints since the engine started. Any thread reads it."""

    masks: int = 0
    """Masks of permitted tokens, one for each token of a constrained text but the first."""
    seconds: float = 0.0
    """Processor time to compute the masks and to follow the texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Sequences and KV pages at one instant, and counts since the engine started."""

    running: int = 0
    """Sequences in the batch."""
    waiting: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    """Pages of the prefix cache; running sequences may use them, too."""
    pages_evictable: int = 0
    """Pages of the prefix cache that no sequence uses."""
    pages_total: int = 0
    preemptions: int = 0
    cached_positions: int = 0
    """Prompt positions that the prefix cache supplied."""
    prompt_positions: int = 0

    @property
    def pages_held(self) -> int:
        """Pages that only running sequences use."""
        return max(0, self.pages_total - self.pages_free - self.pages_cached)

    @property
    def kv_use(self) -> float:
        """Share of the pages that sequences use, in [0, 1]. Requests may take the rest."""
        free = self.pages_free + self.pages_evictable
        return max(0, self.pages_total - free) / max(self.pages_total, 1)

    @property
    def prefix_hit_rate(self) -> float:
        """Positions reused over positions of prompts, in [0, 1]; 0 before the first prompt."""
        return self.cached_positions / self.prompt_positions if self.prompt_positions else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCounts:
    """Places are held by requests that are prepared, wait or run."""

    bound: int
    """Without those that only the best priority may take."""
    held: int
    principals: int
    """Principals that hold places."""
    largest_held: int
    """Places of the principal that holds most."""
    displaced: int
    """Requests that lost their place to others, since the start."""


@dataclass(frozen=True, slots=True)
class SkillDescription:
    """A skill as callers see it. ``schema``: JSON text, the schema of an object with ``arguments`` and ``settings``."""

    name: str
    description: str
    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Fixed for the engine's life. Positions are KV positions; sizes are bytes."""

    model: str
    """Name that requests and results carry, e.g. "kestrel-small"."""
    family: Family
    skills: tuple[str, ...]
    max_context: int
    """Most positions of one sequence as served: the model's context, or less if configured or short of pages."""
    image_positions: int
    max_crops: int
    """Limit on the tiles that the model cuts an image into."""
    vocab_size: int
    num_parameters: int
    weights_bytes: int
    weights_fingerprint: str
    """64 hexadecimal digits, or "random:SEED:DEVICE:DTYPE" of weights that were made up."""
    device: str
    device_name: str = ""
    """The driver's name of a CUDA device; else ""."""
    dtype: str
    weights: str = ""
    """"int8" or "int4", if weights of products are narrower than ``dtype``."""
    max_batch_size: int
    num_pages: int
    page_size: int
    kv_cache_bytes: int = 0
    """Of all pages."""
    kv_cache_dtype: str = ""
    """As ``dtype``, or "float8_e4m3fn"."""
    max_queue: int
    torch_version: str
    calibrated: tuple[str, ...] = ()
    """The skills whose scores are calibrated, and "absence"."""
    load: LoadTimes = LoadTimes()
    refines: bool = False
    """The model has a segmentation refiner."""

    @property
    def precision(self) -> str:
        """The types of computation and weights, such as "float32" or "bfloat16 with int8 weights"."""
        return f"{self.dtype} with {self.weights} weights" if self.weights else self.dtype
