"""Fixtures that every part of the suite may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when a kernel is defined: here its kernels run on CPU tensors, by interpretation.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with suppress(ImportError):
        from triton.runtime import interpreter

        from tests.interpreter import quicken

        quicken(interpreter)


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From "md2" or "md3" to that golden model's checkpoint folder, unpacked once a session. Don't write to it."""
    from tests.golden.checkpoint import unpack

    folders: dict[str, Path] = {}

    def folder(model: str) -> Path:
        if model not in folders:
            folders[model] = unpack(model, tmp_path_factory.mktemp("golden") / model)
        return folders[model]

    return folder


@pytest.fixture(scope="session")
def golden_images() -> Path:
    """The folder of the golden pictures."""
    from tests.golden.checkpoint import DATA

    return DATA / "images"
