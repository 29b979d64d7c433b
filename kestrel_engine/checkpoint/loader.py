"""Weights from files into tensors of the wanted dtype and device, one at a time.

Files are memory-mapped. On the CPU a tensor that already has the wanted dtype stays mapped and costs no anonymous
memory; every other one is converted alone, so the peak is the target's size plus one tensor. Knows canonical names and
shapes, not what the model does with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..model_config import ModelConfig
from .config_file import config_beside
from .files import StoredTensor, find_files, is_pickle, load_pickle, read_headers
from .fingerprint import Fingerprint
from .memory import require_memory
from .names import Part
from .plan import (
    CheckpointPlan,
    Faults,
    TensorPlan,
    checkpoint_error,
    model_config_for,
    no_config_hint,
    plan_checkpoint,
)
from .progress import log_progress

if TYPE_CHECKING:
    from .progress import Progress

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 1 << 22
Read = Callable[[StoredTensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """``tensors``: canonical name -> tensor of the wanted dtype and device; ``region.ln`` may be absent (identity).

    CPU tensors may be views of the mapped file: never write to them in place. ``fingerprint``: 64 hexadecimal digits,
    the same for the same weights in other files, names or target dtypes. ``ignored``: stored names not needed.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    fingerprint: str
    files: tuple[Path, ...]
    ignored: tuple[str, ...]


def load_checkpoint(
    path: str | Path,
    *,
    config: ModelConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedCheckpoint:
    """Loads a folder or file; ``config`` defaults to config.json beside it, and to the released shapes without one.

    Raises CheckpointError (all names that are wrong, or the broken file), ConfigError, InsufficientMemoryError.
    """
    files = find_files(Path(path))
    stored = read_headers(files)
    hint = ""
    if config is None:
        raw = config_beside(files[0])
        config = model_config_for(raw, stored)
        hint = no_config_hint(raw, config)
    return load_planned(
        plan_checkpoint(stored, config), config, files, dtype, device, progress, hint=hint
    )


def load_planned(
    plan: CheckpointPlan,
    config: ModelConfig,
    files: tuple[Path, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    *,
    hint: str = "",
) -> LoadedCheckpoint:
    """Second stage of `load_checkpoint`: reads the values that ``plan`` names. Raises as it does."""
    device = torch.device(device)
    where = str(files[0] if len(files) == 1 else files[0].parent)
    report = progress or log_progress("loading weights")
    if plan.faults:
        # Still look at the values that fit, so that one error tells everything.
        bad = [name for name, ok in _scan(plan.tensors, files, report) if not ok]
        raise checkpoint_error(where, _with_nonfinite(plan, bad), hint=hint)
    require_memory(
        plan.num_elements * dtype.itemsize,
        device,
        what=f"{where}: weights as {str(dtype).removeprefix('torch.')}",
    )
    if config.region.decoder == "linear":
        present = any(tensor.name.startswith("region.ln.") for tensor in plan.tensors)
        logger.info("region.ln: %s", "loaded" if present else "absent, the identity is used")
    if plan.ignored:
        logger.info("not needed: %d tensors such as %s", len(plan.ignored), plan.ignored[0])
    tensors: dict[str, torch.Tensor] = {}
    fingerprint = Fingerprint()
    nonfinite: list[str] = []
    total = plan.num_elements * dtype.itemsize
    done = 0
    with _Reader(files) as read:
        for item in plan.tensors:
            source = _part(read(item.stored), item)
            fingerprint.add(item.name, source)
            if item.scale is None:
                tensor = source.to(device=device, dtype=dtype)
            else:
                scale = read(item.scale)
                fingerprint.add(f"{item.name}.scale", scale)
                tensor = _dequantise(source, scale, dtype, device)
            if not is_finite(tensor):
                nonfinite.append(item.name)
            tensors[item.name] = tensor
            done += tensor.nbytes
            report(done, total, item.name)
    if nonfinite:
        raise checkpoint_error(where, _with_nonfinite(plan, nonfinite), hint=hint)
    return LoadedCheckpoint(config, tensors, fingerprint.hexdigest(), files, plan.ignored)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity. Reads in chunks, allocates next to nothing on the CPU."""
    flat = tensor.reshape(-1)
    step = _CHUNK_ELEMENTS if tensor.device.type == "cpu" else max(flat.numel(), 1)
    for start in range(0, flat.numel(), step):
        chunk = flat[start : start + step]
        if chunk.dtype.itemsize == 1:
            chunk = chunk.float()
        # Minimum and maximum carry NaN on, so two numbers tell about the whole chunk.
        if not bool(torch.isfinite(torch.stack(torch.aminmax(chunk))).all()):
            return False
    return True


def _dequantise(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """W[e, o, :] = float(weight[e, o, :]) * scale[e, o], an expert at a time (moondream.md section 2.4)."""
    out = torch.empty(weight.shape, dtype=dtype, device=device)
    scale = scale.to(device=device, dtype=torch.float32)
    for expert in range(weight.shape[0]):
        values = weight[expert].to(device).to(torch.float32)
        out[expert].copy_(values.mul_(scale[expert].unsqueeze(-1)))
    return out


def _part(tensor: torch.Tensor, item: TensorPlan) -> torch.Tensor:
    if item.part is Part.TRANSPOSED:
        return tensor.t().contiguous()
    if item.part is Part.FIRST_ROWS:
        return tensor[: item.shape[0]].contiguous()
    if item.part is Part.LAST_ROWS:
        return tensor[item.shape[0] :].contiguous()
    return tensor.contiguous()


def _scan(
    tensors: Sequence[TensorPlan], files: tuple[Path, ...], report: Progress
) -> Iterator[tuple[str, bool]]:
    total = sum(item.num_elements for item in tensors)
    done = 0
    with _Reader(files) as read:
        for item in tensors:
            fine = is_finite(_part(read(item.stored), item))
            yield item.name, fine and (item.scale is None or is_finite(read(item.scale)))
            done += item.num_elements
            report(done, total, item.name)


def _with_nonfinite(plan: CheckpointPlan, names: list[str]) -> Faults:
    stored = {item.name: item.stored.name for item in plan.tensors}
    details = {**plan.faults.details, **{name: stored[name] for name in names}}
    return replace(plan.faults, nonfinite=names, details=details)


class _Reader:
    """Opens every file once and hands out mapped CPU tensors by description."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files
        self._stack = ExitStack()
        self._open: dict[Path, Callable[[str], torch.Tensor]] = {}

    def __enter__(self) -> Read:
        return self._read

    def __exit__(self, *exc: object) -> None:
        self._open.clear()
        self._stack.close()

    def _read(self, tensor: StoredTensor) -> torch.Tensor:
        if tensor.file not in self._open:
            self._open[tensor.file] = self._opener(tensor.file)
        try:
            return self._open[tensor.file](tensor.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} can't be read ({error})"
            ) from error

    def _opener(self, file: Path) -> Callable[[str], torch.Tensor]:
        if is_pickle(file):
            return load_pickle(file).__getitem__
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: broken or truncated ({error})") from error
        get: Callable[[str], torch.Tensor] = handle.get_tensor
        return get
