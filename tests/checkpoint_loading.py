"""load_checkpoint: a checkpoint by its path alone, where a server opens a model (checkpoint/open.py)."""

from __future__ import annotations

from pathlib import Path

import torch

from kestrel_engine.checkpoint.config_file import config_beside
from kestrel_engine.checkpoint.files import find_files, read_headers
from kestrel_engine.checkpoint.weights.loader import LoadedCheckpoint, load_planned
from kestrel_engine.checkpoint.weights.plan import model_config_for, no_config_hint, plan_checkpoint
from kestrel_engine.types.model_config import ModelConfig
from kestrel_engine.types.progress import Progress


def load_checkpoint(
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    keep_fp8: bool = False,
    narrow: str = "wide",
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Loads the checkpoint at ``path``, a folder or a file. ``config`` defaults to the config.json beside the weights,
    or to the released shapes without one."""
    files = find_files(Path(path))
    stored = read_headers(files)
    hint = ""
    if config is None:
        raw = config_beside(files[0])
        config = model_config_for(raw, stored)
        hint = no_config_hint(raw, config)
    plan = plan_checkpoint(stored, config)
    return load_planned(
        *(plan, config, files, dtype, device, progress),
        keep_fp8=keep_fp8,
        narrow=narrow,
        hint=hint,
    )
