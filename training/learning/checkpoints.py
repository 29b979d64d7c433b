"""Checkpoints in pieces below 16 MiB: float32 weights and the progress of training.

The state of the optimisers covers about twenty steps (betas .9/.95), so it is not stored: a resumed run warms up again.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

PIECE = 15 * 1024 * 1024


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write ``state`` as part-00.bin, part-01.bin ... in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    for old in folder.glob("part-*.bin"):
        old.unlink()
    for number, start in enumerate(range(0, len(data), PIECE)):
        (folder / f"part-{number:02d}.bin").write_bytes(data[start : start + PIECE])


def load(folder: Path) -> dict[str, Any]:
    parts = sorted(folder.glob("part-*.bin"))
    if not parts:
        raise FileNotFoundError(f"no checkpoint pieces in {folder}")
    state: dict[str, Any] = torch.load(
        io.BytesIO(b"".join(p.read_bytes() for p in parts)), map_location="cpu"
    )
    return state
