"""The process of building/early_kernels.py: it compiles the kernels of the model that its standard input names."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace

from ..processes.parent_death import end_with_parent


def main() -> None:
    """Compiles, and ends with status 0. Ends with its parent, too, which keeps the pipe open."""
    config, capabilities, folder = pickle.load(sys.stdin.buffer)
    end_with_parent(sys.stdin.fileno())
    from .cards import Card
    from .models import compile_model

    # What its weights are does not matter, and another process downloads them.
    config = replace(config, kernel_cache_dir=None, offline=True)
    compile_model(config, Card(**capabilities), folder)
