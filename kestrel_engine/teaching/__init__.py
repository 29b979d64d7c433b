"""Teaching: fits a LoRA adapter to labelled images, in this process, and writes it where a server finds it.

The functions import torch and other large packages when they are called, so importing this package is cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.runtime import RuntimeConfig
from .settings import LAYERS, TeachingSettings

if TYPE_CHECKING:
    from ..types.progress import Progress
    from .data.examples import TaughtImage
    from .learning.fitting import FitStep
    from .teacher import TeachingReport

__all__ = ["LAYERS", "TeachingSettings", "read_folder", "teach"]


def read_folder(folder: Path) -> list[TaughtImage]:
    """Reads a folder of labelled images: data.jsonl, or annotations.json in COCO's form (docs/use/teaching.md).

    Raises ConfigError, which names the file, the line and the field.
    """
    from .data.folder import read_folder

    return read_folder(folder)


async def teach(
    config: RuntimeConfig,
    adapter: str,
    images: Sequence[TaughtImage],
    settings: TeachingSettings | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_step: Callable[[FitStep], None] | None = None,
) -> TeachingReport:
    """Fits the adapter named ``adapter`` to ``images`` and writes it into ``config.adapters_dir`` by one rename.

    ``overwrite``: replace an adapter of this name. ``progress``: called while files are loaded and answers are made.
    ``on_step``: called after each step of the training, from another thread. Raises KestrelError; ConfigError if the
    name is invalid or taken.
    """
    from .teacher import teach

    return await teach(
        config,
        adapter,
        images,
        settings or TeachingSettings(),
        overwrite=overwrite,
        progress=progress,
        on_step=on_step,
    )
