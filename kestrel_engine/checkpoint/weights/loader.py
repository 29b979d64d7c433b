"""Loads weights from files into tensors of the requested dtype and device, one tensor at a time.

For the CPU, a tensor that stays as it is stored is mapped and takes no anonymous memory. All others are read ahead by
``device_reader`` and converted one by one: a mapped file's pages would stay resident beside the result.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ...errors import CheckpointError
from ...models.weight_only import scale_of
from ...types.model_config import ModelConfig
from ..files import StoredTensor, is_pickle, load_pickle
from ..progress import log_progress
from . import int4
from .device_reader import DeviceReader
from .finite import FiniteCheck, is_constant, is_finite
from .fp8 import dequantise
from .memory import require_memory
from .names import TensorPart
from .plan import CheckpointPlan, Faults, TensorPlan, checkpoint_error
from .rounding import form_of, may_stay, rounded, rounded_bytes

if TYPE_CHECKING:
    from ...types.progress import Progress

logger = logging.getLogger(__name__)

KEPT_FP8 = "F8_E4M3"
"""The stored dtype of experts that can stay in FP8: the dtype that the kernels read."""
INT4_SAMPLES = 8
"""Weights from which the order of 4-bit numbers is found: some 100,000 groups of a released model."""
Read = Callable[[StoredTensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The weights of a model.

    ``tensors``: by canonical name, in the requested dtype and on the requested device. ``region.ln`` may be absent.
    Experts that stay in FP8 are ``….mlp.fc1.weight`` float8_e4m3fn with the row scales ``….mlp.fc1.scale`` float32; fc2
    likewise. CPU tensors may be views of the mapped file, so never write to them in place. ``fingerprint``: of
    `Fingerprint`. ``ignored``: stored names that the model does not need.
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    fingerprint: str
    files: tuple[Path, ...]
    ignored: tuple[str, ...]


def load_planned(
    plan: CheckpointPlan,
    config: ModelConfig,
    files: tuple[Path, ...],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    *,
    keep_fp8: bool = False,
    narrow: str = "wide",
    hint: str = "",
    read_ahead: bool | None = None,
) -> LoadedCheckpoint:
    """Reads the values of ``plan``. ``narrow``: as in `rounding`. ``hint``: the end of an error. ``read_ahead``: read
    with DeviceReader instead of mapped files. By default, a CPU maps the tensors that stay as they are stored. Raises
    CheckpointError (with all wrong names, or the damaged file) and InsufficientMemoryError."""
    device = torch.device(device)
    where = str(files[0] if len(files) == 1 else files[0].parent)
    report = progress or log_progress("loading weights")
    if plan.faults:
        # Also check the values of tensors that fit, so that one error reports everything.
        bad, _, _ = check_values(plan, files, report)
        raise checkpoint_error(where, _with_nonfinite(plan, bad), hint=hint)
    total = sum(loaded_bytes(item, dtype, device, keep_fp8, narrow) for item in plan.tensors)
    kind = str(dtype).removeprefix("torch.") + (" and FP8 experts" if keep_fp8 else "")
    kind += f" and {narrow}" if narrow in ("int4", "int8") else ""
    require_memory(total, device, what=f"{where}: weights as {kind}")
    if config.region.decoder == "linear":
        present = any(tensor.name.startswith("region.ln.") for tensor in plan.tensors)
        logger.info("region.ln: %s", "loaded" if present else "absent, the identity is used")
    if plan.ignored:
        logger.info("not used: %d tensors, such as %s", len(plan.ignored), plan.ignored[0])
    tensors: dict[str, torch.Tensor] = {}
    fingerprint = Fingerprint()
    finite = FiniteCheck()
    done = 0
    order = _int4_order(plan, config, files)
    ahead = {
        item.name
        for item in plan.tensors
        if (read_ahead is None and not _stays_mapped(item, dtype, device, narrow)) or read_ahead
    }
    wanted = [source for item in plan.tensors if item.name in ahead for source in item.sources]
    with DeviceReader(wanted, device) as read, _Reader(files) as mapped:
        for item in plan.tensors:
            source, *rest = _parts(item, read if item.name in ahead else mapped, fingerprint)
            form = form_of(item.name, item.shape, narrow, device)
            if not rest:
                # A row is widened when it is rounded, so that the whole matrix needs no copy.
                kept = form is not None and dtype == torch.float32
                made = {item.name: source.to(device, source.dtype if kept else dtype)}
            elif order is not None and item.zero_point is not None:
                packed = source, rest[0], rest[1]
                if stays_int4(item, narrow):
                    numbers, scales = int4.keep(packed, item.shape, order, device)
                    made = {item.name: numbers, scale_of(item.name): scales}
                    finite.add(item.name, int4.ends(rest[0], rest[1], dtype))
                else:
                    made = {item.name: int4.dequantise(packed, item.shape, order, dtype, device)}
            elif _stays_fp8(item, keep_fp8 and narrow in ("wide", "stored")):
                row_scales = rest[0].to(device=device, dtype=torch.float32).contiguous()
                made = {item.name: source.to(device), scale_of(item.name): row_scales}
                finite.add(item.name, row_scales * torch.finfo(source.dtype).max)
            else:
                made = {item.name: dequantise(source, rest[0], dtype, device)}
            finite.add(item.name, *made.values())
            if form is not None and len(made) == 1:
                made = rounded(item.name, made[item.name], form)
            tensors |= made
            done += sum(tensor.nbytes for tensor in made.values())
            report(done, total, item.name)
    if nonfinite := finite.nonfinite():
        raise checkpoint_error(where, _with_nonfinite(plan, nonfinite), hint=hint)
    return LoadedCheckpoint(config, tensors, fingerprint.hexdigest(), files, plan.ignored)


def check_values(
    plan: CheckpointPlan, files: tuple[Path, ...], progress: Progress | None = None
) -> tuple[list[str], list[str], str]:
    """Reads every value once and keeps none. Returns the names of tensors that aren't finite, the names of matrices
    whose values are all the same, and the fingerprint. Raises CheckpointError for a file that can't be read.
    """
    report = progress or log_progress("reading weights")
    fingerprint = Fingerprint()
    nonfinite: list[str] = []
    constant: list[str] = []
    total, done = plan.num_elements, 0
    with _Reader(files) as read:
        for item in plan.tensors:
            parts = _parts(item, read, fingerprint)
            if item.zero_point is not None:
                parts.append(int4.ends(parts[1], parts[2], torch.float32))
            if not all(map(is_finite, parts)):
                nonfinite.append(item.name)
            elif len(item.shape) > 1 and is_constant(parts[0]):
                constant.append(item.name)
            done += item.num_elements
            report(done, total, f"reading {item.name}")
    return nonfinite, constant, fingerprint.hexdigest()


def read_tensors(files: tuple[Path, ...], wanted: Sequence[StoredTensor]) -> list[torch.Tensor]:
    """Reads the ``wanted`` tensors as they are stored, onto the CPU. Raises CheckpointError for an unreadable file."""
    with _Reader(files) as read:
        return [read(tensor).clone() for tensor in wanted]


def _int4_order(
    plan: CheckpointPlan, config: ModelConfig, files: tuple[Path, ...]
) -> int4.Order | None:
    """Returns the order of 4-bit numbers, from a few of the smallest weights; None if there are no such weights."""
    packed = sorted(
        (item for item in plan.tensors if item.zero_point is not None), key=lambda i: i.num_elements
    )
    if not packed:
        return None
    # The release of Moondream 2 is known (moondream.md section 2.5).
    default = int4.Order.HALVES if config.family == "moondream2" else None
    with _Reader(files) as read:
        samples = [tuple(map(read, item.sources)) for item in packed[:INT4_SAMPLES]]
        return int4.find_order(((p, s, z) for p, s, z in samples), default=default)


def stores_fp8(plan: CheckpointPlan) -> bool:
    """Returns whether a checkpoint has weights that can stay in FP8."""
    return any(_stays_fp8(item, True) for item in plan.tensors)


def _stays_fp8(item: TensorPlan, keep_fp8: bool) -> bool:
    return keep_fp8 and item.scale is not None and item.stored.dtype == KEPT_FP8


def stays_int4(item: TensorPlan, narrow: str) -> bool:
    """Returns whether a tensor is stored in 4 bits and stays so; ``narrow``: as in `rounding`."""
    kept = narrow != "wide" and item.zero_point is not None
    return kept and may_stay(item.name, item.shape, item.stored.shape[-1])


def _stays_mapped(item: TensorPlan, dtype: torch.dtype, device: torch.device, narrow: str) -> bool:
    """Returns whether a tensor is used as the file has it, on a CPU."""
    whole = len(item.sources) == 1 and item.part is not TensorPart.TRANSPOSED
    same = whole and item.stored.torch_dtype == dtype
    return device.type == "cpu" and same and form_of(item.name, item.shape, narrow, device) is None


def loaded_bytes(
    item: TensorPlan, dtype: torch.dtype, device: torch.device, keep_fp8: bool, narrow: str
) -> int:
    """Returns the bytes of a loaded tensor and of its scales; arguments as of `load_planned`."""
    if stays_int4(item, narrow):
        return sum(source.num_bytes for source in item.sources)
    form = form_of(item.name, item.shape, narrow, device)
    if _stays_fp8(item, keep_fp8) and form is None:
        return item.num_elements + 4 * prod(item.shape[:-1])
    if form is not None:
        return rounded_bytes(item.shape, form)
    return item.num_elements * dtype.itemsize


def _parts(item: TensorPlan, read: Read, fingerprint: Fingerprint) -> list[torch.Tensor]:
    """The values of ``item``, and its scales and zero points if it has them, which count in ``fingerprint``."""
    parts = [_part(read(item.stored), item), *map(read, item.sources[1:])]
    for suffix, part in zip(("", ".scale", ".zero_point"), parts, strict=False):
        fingerprint.add(f"{item.name}{suffix}", part)
    return parts


def _part(tensor: torch.Tensor, item: TensorPlan) -> torch.Tensor:
    if item.part is TensorPart.TRANSPOSED:
        return tensor.t().contiguous()
    if item.part in (TensorPart.FIRST_ROWS, TensorPart.LAST_ROWS):
        first = item.part is TensorPart.FIRST_ROWS
        rows = tensor[: item.shape[0]] if first else tensor[item.shape[0] :]
        # On a device, a view would keep the other half allocated. On the CPU, the file is mapped.
        return rows.contiguous() if rows.device.type == "cpu" else rows.clone()
    return tensor.contiguous()


def _with_nonfinite(plan: CheckpointPlan, names: list[str]) -> Faults:
    stored = {item.name: item.stored.name for item in plan.tensors}
    details = {**plan.faults.details, **{name: stored[name] for name in names}}
    return replace(plan.faults, nonfinite=names, details=details)


class _Reader:
    """A context manager that returns a function from StoredTensor to a mapped CPU tensor. Opens every file once."""

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
            raise CheckpointError(f"{file}: damaged or truncated ({error})") from error
        get: Callable[[str], torch.Tensor] = handle.get_tensor
        return get


WHOLE_BYTES = 64 * 1024
SAMPLES = 32
SAMPLE_BYTES = 2048


class Fingerprint:
    """A fingerprint of weights: equal for equal weights in any file format, and cheap to compute for 20 GB. It is a
    SHA-256 over canonical names, shapes, stored dtypes and *sampled* bytes: all bytes of tensors up to 64 KiB, and of
    larger tensors 32 evenly spaced samples of 2 KiB, including the first and the last bytes. It does not detect a
    deliberate change between the samples, and does not depend on the order of the tensors."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor as stored, on any device, under its canonical name. Reads at most WHOLE_BYTES of its data."""
        digest = hashlib.sha256(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        data = tensor.contiguous().view(-1).view(torch.uint8)
        size = data.nbytes
        if size > WHOLE_BYTES:
            starts = ((size - SAMPLE_BYTES) * sample // (SAMPLES - 1) for sample in range(SAMPLES))
            data = torch.cat([data[start : start + SAMPLE_BYTES] for start in starts])
        digest.update(data.cpu().numpy().tobytes())
        self._digests[name] = digest.digest()

    def hexdigest(self) -> str:
        """64 hexadecimal digits."""
        total = hashlib.sha256()
        for name in sorted(self._digests):
            total.update(self._digests[name])
        return total.hexdigest()
