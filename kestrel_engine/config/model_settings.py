"""ModelSettings: what an engine loads: a model, its files and adapters; and the seed of what is random."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .adapters import AdapterSources
from .groups import MODEL

DEFAULT_MODEL = "kestrel-small"


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """The files of a model, in place of ``model_path`` and ``tokenizer_path``."""

    weights: str | Path
    tokenizer: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    model: str = MODEL.setting(
        DEFAULT_MODEL,
        "kestrel-small, moondream2, moondream3-preview, moondream3.1-9b-a2b, "
        "a hub id ORG/REPO[@REVISION][:FILE], a bucket s3://BUCKET/PREFIX, or a path",
    )
    model_path: str | Path | None = MODEL.setting(
        None,
        "folder of a checkpoint, one .safetensors or .pt file, or s3://BUCKET/PREFIX, to use instead of the model's "
        "own weights",
        flag="--weights",
        metavar="PATH",
        shown="the model's own",
    )
    cache_dir: str | Path = MODEL.setting(
        "~/.cache/kestrel",
        "folder that keeps models of buckets (in weights) and downloaded adapters (in adapters); all processes and "
        "containers of a machine may share it, and weights may be read-only if the model is there",
        metavar="DIR",
    )
    weights_cache_gib: float | None = MODEL.setting(
        None,
        "limit of all models of buckets in --cache-dir in GiB; a new model takes the place of models that no process "
        "uses, the least recently used first",
        metavar="GIB",
        above=0,
        shown="no limit",
    )
    tokenizer_path: str | Path | None = MODEL.setting(
        None,
        "file tokenizer.json, or a folder that holds it",
        flag="--tokenizer",
        metavar="PATH",
        shown="the one beside the weights, else the model's own",
    )
    refiner: str | Path = MODEL.setting(
        "auto",
        "segmentation refiner: a file of its weights, moondream/SegHeadRefiner (released for Moondream 3), off, or "
        "auto, the file refiner.safetensors beside the weights if there is one",
        metavar="auto|off|PATH|moondream/SegHeadRefiner",
    )
    calibration: str | Path = MODEL.setting(
        "auto",
        "file of the model's score calibration, from 'kestrel-grpc calibrate'; auto: score_calibration.json beside the "
        "weights, if there is one; off: raw scores",
        metavar="FILE",
    )
    adapters_dir: str | Path | None = MODEL.setting(
        None,
        "folder of adapters (LoRA) that requests may name: NAME.safetensors, NAME.pt or a folder NAME each; files may "
        "come, change and go while the server runs",
        metavar="DIR",
        shown="no adapters",
    )
    adapter_cache_bytes: int = MODEL.setting(
        1024 * 1024 * 1024,
        "limit on the memory of all loaded adapters together; the least recently used ones are dropped",
        low=1,
    )
    adapter_sources: AdapterSources = field(default_factory=AdapterSources)
    offline: bool = MODEL.setting(
        False, "never contact the hub; use its cache and local files only"
    )
    random_weights: bool = MODEL.setting(
        False,
        "generate random weights for the named model or a config.json instead of reading weights, to measure speed",
    )
    seed: int | None = MODEL.setting(
        None,
        "seed of --random-weights and of the requests that set no seed, so that results repeat after a restart",
        low=0,
        high=2**63 - 1,
        shown="random at each start",
    )
