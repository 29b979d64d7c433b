"""Checkpoint files on disk: which files form a checkpoint, and the names, shapes and dtypes of their tensors.

A checkpoint is .safetensors (one file, or several with a ``*.safetensors.index.json``) or .pt/.pth. This module reads
headers only and imports torch only for .pt files.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..small_files import MIB, read_small_json

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".pt", ".pth")
_SHARD = re.compile(r"^(.+)-\d+-of-(\d+)\.safetensors$")
# Keys under which training scripts store the weights in a saved dictionary.
_NESTED_KEYS = (
    "lora_state_dict",
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "weights",
    "head",
)


DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U8": ("uint8", 1),
}
"""Of weights and adapters, by their names in safetensors: the name in torch, and the bytes of a number."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. ``dtype``: its name in safetensors, such as F32, BF16, F8_E4M3 or I64."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def num_bytes(self) -> int:
        """Raises KeyError for a dtype that is not in DTYPES, as ``torch_dtype``."""
        return prod(self.shape) * DTYPES[self.dtype][1]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return dtype

    @property
    def is_float8(self) -> bool:
        return self.dtype.startswith("F8")

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


def find_files(path: Path) -> tuple[Path, ...]:
    """Returns the weight files at ``path``, a folder or a file. Raises CheckpointError if there is no checkpoint, if
    there are several, or if files are missing."""
    if path.is_file():
        return _expand(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or folder")
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    plain = sorted(path.glob("*.safetensors"))
    pickles = sorted(p for suffix in PICKLE_SUFFIXES for p in path.glob(f"*{suffix}"))
    for candidates in (
        [p for p in indices if p.name == f"model{INDEX_SUFFIX}"],
        [p for p in plain if p.name == "model.safetensors"],
        indices,
    ):
        if len(candidates) == 1:
            return _expand(candidates[0])
    shards = [m for p in plain if (m := _SHARD.match(p.name))]
    if plain and len(shards) == len(plain) and len({m[1] for m in shards}) == 1:
        if len(shards) != int(shards[0][2]):
            raise CheckpointError(f"{path}: holds {len(shards)} of {shards[0][2]} shards")
        return tuple(plain)
    choice = plain or pickles
    if len(choice) == 1:
        return (choice[0],)
    if not choice:
        raise CheckpointError(f"{path}: holds no .safetensors, .pt or .pth file")
    names = ", ".join(p.name for p in choice)
    raise CheckpointError(f"{path}: several checkpoints ({names}); give the path of one file")


def shard_names(index: Path) -> tuple[str, ...]:
    """File names listed in an index, each once, in order. Raises CheckpointError for anything but plain names."""
    try:
        weight_map = read_small_json(index, 64 * MIB)["weight_map"]
        names = tuple(dict.fromkeys(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index}: is not a readable index ({error})") from error
    for name in names:
        # An index comes with the weights from elsewhere: it must not reach outside its folder.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("safetensors"):
            raise CheckpointError(f"{index}: {name!r} is not the name of a safetensors file")
    return names


def read_headers(files: tuple[Path, ...]) -> dict[str, StoredTensor]:
    """Returns each stored tensor by name, in the order of the data. Raises CheckpointError, which names the file."""
    out: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _pickle_header(file) if is_pickle(file) else _safetensors_header(file):
            if tensor.name in out:
                raise CheckpointError(
                    f"{tensor.name} is in {out[tensor.name].file.name} and in {file.name}"
                )
            out[tensor.name] = tensor
    return out


def is_pickle(file: Path) -> bool:
    return file.suffix in PICKLE_SUFFIXES


def load_pickle(file: Path, *, mmap: bool = True) -> dict[str, Any]:
    """Returns the tensors of a .pt file by name, on the CPU, with ``mmap`` memory-mapped. Runs no code from the file
    (``weights_only``). Raises CheckpointError."""
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # The unpickler of torch raises anything for a damaged file.
        # The texts of torch advise to switch off weights_only.
        what = "holds other objects than tensors"
        if not isinstance(error, pickle.UnpicklingError):
            what = "is damaged, or in the old format of torch; write it again with torch.save"
        raise CheckpointError(f"{file}: {what}") from error
    for _ in range(3):
        if not isinstance(loaded, Mapping):
            break
        tensors = {k: v for k, v in loaded.items() if isinstance(v, torch.Tensor)}
        if tensors:
            return {str(k): v.detach() for k, v in tensors.items()}
        loaded = next((loaded[k] for k in _NESTED_KEYS if isinstance(loaded.get(k), Mapping)), None)
    raise CheckpointError(f"{file}: holds no dictionary of tensors")


def _expand(path: Path) -> tuple[Path, ...]:
    if path.name.endswith(INDEX_SUFFIX):
        files = tuple(path.parent / name for name in shard_names(path))
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{path}: lists files that do not exist: {', '.join(absent)}")
        return files
    if path.suffix == ".safetensors" or is_pickle(path):
        return (path,)
    raise CheckpointError(f"{path}: expected .safetensors, {INDEX_SUFFIX[1:]}, .pt or .pth")


def _safetensors_header(file: Path) -> list[StoredTensor]:
    try:
        with safe_open(file, framework="np") as handle:
            out = []
            for name in handle.offset_keys():
                view = handle.get_slice(name)
                out.append(StoredTensor(name, tuple(view.get_shape()), view.get_dtype(), file))
            return out
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: damaged or truncated ({error})") from error


def _pickle_header(file: Path) -> list[StoredTensor]:
    names = {name: stored for stored, (name, _) in DTYPES.items()}
    found = []
    for name, tensor in load_pickle(file).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        found.append(StoredTensor(name, tuple(tensor.shape), names.get(dtype, dtype), file))
    return found
