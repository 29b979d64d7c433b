"""Teaching: fits a LoRA adapter to labelled images, in this process, and writes it where a server finds it.

The functions are imported when they are called, with torch and other large packages, so importing this package is
cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazily
from .settings import TeachingSettings

if TYPE_CHECKING:
    from .data.folder import read_folder
    from .teacher import teach
else:
    __getattr__ = lazily(__name__, {".data.folder": ("read_folder",), ".teacher": ("teach",)})

__all__ = ["TeachingSettings", "read_folder", "teach"]
