"""The files of one adapter: finds them, checks names and shapes against the model, and only then reads tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, Protocol

from ..checkpoint.files import PICKLE_SUFFIXES, StoredTensor, find_files
from ..checkpoint.safetensors_header import Header
from ..checkpoint.weights.expected import Shapes
from ..errors import AdapterNotFound, AdapterUnfit, CheckpointError
from ..small_files import read_small_json
from ..types.adapter import Adapter
from ..types.model_config import TextConfig
from .names import Target, target_of
from .peft import CONFIG_NAME, Sides, scales
from .references import is_adapter_name, shortened
from .stored import describe, opened_tensors
from .targets import MAX_RANK

if TYPE_CHECKING:
    import torch

    from ..models.low_rank import LowRank

MAX_CONFIG_BYTES = 1 << 20
SUFFIXES = (".safetensors", *PICKLE_SUFFIXES)
_PIECE = 1 << 18
"""Elements that are converted at a time, in some 0.2 ms. Steps run meanwhile. Smaller pieces would ask for the
interpreter more often."""

_TWICE = {"text_lora", "_text"}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of an adapter. ``stamps``: what changes when a file does."""

    name: str
    files: tuple[Path, ...]
    stamps: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter that fits the model. ``pairs``: A and B of each module. ``scales``: B's factor of each module.
    ``count``: elements."""

    found: AdapterFiles
    pairs: Mapping[str, Sides]
    scales: Mapping[str, float]

    @property
    def count(self) -> int:
        return sum(prod(side.shape) for pair in self.pairs.values() for side in pair)

    @property
    def ranks(self) -> dict[str, int]:
        return {module: a.shape[-2] for module, (a, _) in self.pairs.items()}


class Packer(Protocol):
    """The form in which kernels read adapters, if they do not read A and B of each module."""

    def refusal(self, ranks: Mapping[str, int]) -> str | None:
        """Returns why an adapter with the ``ranks`` of its modules can't be computed; None if it can."""
        ...

    def num_bytes(self, ranks: Mapping[str, int]) -> int:
        """Returns the device memory of an adapter."""
        ...

    def packed(self, weights: Mapping[str, LowRank]) -> Mapping[str, torch.Tensor]:
        """Returns an adapter, whose tensors are on the CPU, by kind (`Adapter.slabs`), on the CPU too."""
        ...


def find(folder: Path, name: str) -> AdapterFiles:
    """Returns the files of a checked ``name``: a folder, or a .safetensors, .pt or .pth file. Raises AdapterNotFound,
    and AdapterUnfit if there are several."""
    entries = [folder / name, *(folder / f"{name}{suffix}" for suffix in SUFFIXES)]
    there = [entry for entry in entries[1:] if entry.is_file()]
    there += [entry for entry in entries[:1] if entry.is_dir()]
    if not there:
        raise AdapterNotFound("adapter", f"there is no adapter {name!r}")
    if len(there) > 1:
        names = ", ".join(sorted(entry.name for entry in there))
        raise AdapterUnfit("adapter", f"{name!r} means several: {names}; keep one of them")
    return found_in(there[0], name)


def names_in(folder: Path) -> list[str]:
    """The valid names of the adapters in ``folder``, whether they fit or not. Empty if the folder can't be read."""
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    names = {
        entry.stem if entry.suffix in SUFFIXES else entry.name
        for entry in entries
        if entry.suffix in SUFFIXES or entry.is_dir()
    }
    return [name for name in names if is_adapter_name(name)]


def found_in(place: Path, name: str) -> AdapterFiles:
    """Returns the files of the adapter ``name`` at ``place``, a folder or a file. Raises AdapterUnfit."""
    with _naming(name, place):
        files = find_files(place)
        if (config := place / CONFIG_NAME).is_file():
            files = (*files, config)
        stats = [file.stat() for file in files]
        for file, stat in zip(files, stats, strict=True):
            if not S_ISREG(stat.st_mode):  # A pipe would hold the thread that reads all adapters.
                raise CheckpointError(f"{file}: is not a plain file")
    return AdapterFiles(name, files, tuple(map(_stamp, stats)))


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def have_changed(found: AdapterFiles) -> bool:
    """Whether the files are others by now."""
    try:
        return tuple(_stamp(file.stat()) for file in found.files) != found.stamps
    except OSError:
        return True


def check(found: AdapterFiles, shapes: Shapes, text: TextConfig) -> CheckedAdapter:
    """Checks all names, shapes and types, and the scale. Reads headers only. Raises AdapterUnfit."""
    with _naming(found.name, found.files[0].parent):
        files = tuple(file for file in found.files if file.name != CONFIG_NAME)
        described = {file: describe(file) for file in files}
        stored: dict[str, StoredTensor] = {}
        sides: dict[Target, StoredTensor] = {}
        for each in described.values():
            for name, tensor in each.tensors.items():
                if stored.setdefault(name, tensor) is not tensor:
                    raise CheckpointError(
                        f"{name} is in {stored[name].file.name} and in {tensor.file.name}"
                    )
                _place(tensor, shapes, text, sides)
        pairs = {}
        for module in dict.fromkeys(target.module for target in sides):
            a, b = (sides.get(Target(module, side)) for side in ("a", "b"))  # type: ignore[arg-type]
            if a is None or b is None:
                one, other = (b, "A") if a is None else (a, "B")
                assert one is not None
                raise CheckpointError(f"{one.name} has no {other} beside it for {module}")
            _check_rank(a, b)
            pairs[module] = Sides(a, b)
        if not pairs:
            raise CheckpointError("holds no tensor")
        is_peft = found.files[-1].name == CONFIG_NAME
        settings = _settings(found, described)
        return CheckedAdapter(found, pairs, scales(settings, pairs, is_peft=is_peft))


def read(checked: CheckedAdapter, dtype: torch.dtype, packer: Packer | None = None) -> Adapter:
    """Reads a checked adapter into host memory. Raises AdapterUnfit for values that aren't finite or changed files."""
    from ..models.low_rank import LowRank

    found = checked.found
    files = {stored.file: None for pair in checked.pairs.values() for stored in pair}
    with _naming(found.name, found.files[0].parent), opened_tensors(tuple(files)) as tensors:
        weights: dict[str, LowRank] = {}
        for module, pair in checked.pairs.items():
            sides = (
                _side(tensors(stored), stored, factor, dtype)
                for stored, factor in zip(pair, (1.0, checked.scales[module]), strict=True)
            )
            weights[module] = LowRank(*sides)
        if have_changed(found):
            raise CheckpointError("the files have changed while they were read")
    key = _key(weights)
    if packer is not None:
        slabs = packer.packed(weights)
        return Adapter(found.name, key, {}, sum(each.nbytes for each in slabs.values()), slabs)
    num_bytes = sum(side.nbytes for pair in weights.values() for side in (pair.a, pair.b))
    return Adapter(found.name, key, weights, num_bytes)


def _side(
    tensor: torch.Tensor, stored: StoredTensor, factor: float, dtype: torch.dtype
) -> torch.Tensor:
    """A or B in ``dtype``, converted piece by piece."""
    import torch

    if tensor.shape != stored.shape or tensor.layout is not torch.strided:
        raise CheckpointError("the files have changed while they were read")
    made = torch.empty(stored.shape, dtype=dtype)
    source, target = tensor.reshape(-1), made.view(-1)
    for begin in range(0, len(target), _PIECE):
        piece = target[begin : begin + _PIECE]
        torch.mul(source[begin : begin + _PIECE].to(torch.float32), factor, out=piece)
        if not torch.isfinite(piece).all():
            name = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{stored.name} holds values that are not finite in {name}")
    return made


def _key(weights: Mapping[str, LowRank]) -> str:
    """A hash of what was read. The files may be others by now."""
    import torch

    digest = hashlib.sha256()
    for module, change in weights.items():
        for side in (change.a, change.b):
            digest.update(f"{module} {tuple(side.shape)} {side.dtype} ".encode())
            digest.update(side.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _place(
    stored: StoredTensor, shapes: Shapes, text: TextConfig, sides: dict[Target, StoredTensor]
) -> None:
    """Adds a stored tensor to ``sides``. Raises CheckpointError if it does not fit."""
    target = target_of(stored.name, text)
    if target is None:
        raise CheckpointError(f"{shortened(stored.name)} is no name of an adapter's tensor")
    weight = shapes.get(target.module)
    if weight is None:
        raise CheckpointError(
            f"{stored.name} changes {target.module}, which adapters of this model can't change"
        )
    if stored.dtype not in ("F64", "F32", "BF16", "F16"):
        raise CheckpointError(f"{stored.name} is {stored.dtype}; expected F32, BF16 or F16")
    shape = stored.shape
    wanted: list[int | str] = list(weight)
    rank_at = -2 if target.side == "a" else -1
    wanted[rank_at] = "rank"
    if len(shape) == len(weight):
        wanted[rank_at] = shape[rank_at]
    if list(shape) != wanted:
        wanted[rank_at] = "rank"
        raise CheckpointError(
            f"{stored.name} has the shape {_shape(shape)}; expected {_shape(wanted)} for {target.module} of this model"
        )
    if not 1 <= shape[rank_at] <= MAX_RANK:
        raise CheckpointError(f"{stored.name} has rank {shape[rank_at]}; a rank is 1 to {MAX_RANK}")
    other = sides.setdefault(target, stored)
    # Moondream registers the module of a fine-tune under two names, so a file may hold each tensor twice.
    if other is not stored and {n.name.partition(".")[0] for n in (other, stored)} != _TWICE:
        raise CheckpointError(f"{other.name} and {stored.name} mean the same tensor")


def _shape(sizes: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _check_rank(a: StoredTensor, b: StoredTensor) -> None:
    if a.shape[-2] != b.shape[-1]:
        raise CheckpointError(
            f"{a.name} has rank {a.shape[-2]}, and {b.name} has rank {b.shape[-1]}; they must be equal"
        )


def _settings(found: AdapterFiles, described: Mapping[Path, Header]) -> Mapping[str, Any]:
    """What the adapter says about itself: PEFT's file beside it, else the metadata of its last file."""
    config = found.files[-1]
    if config.name != CONFIG_NAME:
        return described[config].metadata
    try:
        settings = read_small_json(config, MAX_CONFIG_BYTES)
    except OSError as error:
        raise CheckpointError(f"{CONFIG_NAME} {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{CONFIG_NAME} is no JSON: {error}") from None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{CONFIG_NAME} must be a JSON object")
    return settings


@contextmanager
def _naming(name: str, folder: Path) -> Iterator[None]:
    """Raises errors of files as AdapterUnfit with the adapter's name. Callers do not learn the operator's folders."""
    try:
        yield
    except (CheckpointError, OSError, KeyError) as error:
        what = str(error).replace(f"{folder}/", "").replace(str(folder), folder.name)
        what = "".join(each if each.isprintable() else "?" for each in what)
        raise AdapterUnfit("adapter", f"{name!r} can't be loaded: {what}") from error
