"""Checkpoints in pieces below 16 MiB: the weights, as they are, in bfloat16, or in 8 bits with a scale a row.

    python -m training.learning.checkpoints CHECKPOINT OUT      # in 8 bits

The state of the optimisers covers about twenty steps (betas .9/.95), so it is not stored: a resumed run warms up again.
"""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE = 15 * 1024 * 1024
_SCALE = "#scale"


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


def halved(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The weights of each module in bfloat16."""
    return {
        name: {k: t.detach().to("cpu", torch.bfloat16) for k, t in part.items()}
        for name, part in state.items()
    }


def quantised(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Matrices as int8 with a float32 scale a row; everything else as it is."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, part in state.items():
        own = found[name] = {}
        for key, tensor in part.items():
            if tensor.ndim < 2 or "features" in key:
                own[key] = tensor
                continue
            scale = tensor.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
            own[key] = (tensor.float() / scale).round().to(torch.int8)
            own[key + _SCALE] = scale
    return found


def load_quantised(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Float32 weights of a checkpoint that may be quantised."""
    return {
        name: {k: t.float() * part.get(k + _SCALE, 1) for k, t in part.items() if not k.endswith(_SCALE)}
        for name, part in load(folder).items()
    }  # fmt: skip


if __name__ == "__main__":
    save(Path(sys.argv[2]), quantised(load(Path(sys.argv[1]))))
