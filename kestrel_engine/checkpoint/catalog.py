"""Resolves the name of a model to the location of its weights and its tokenizer. Uses no network and reads no weights.

A name is one of `KNOWN`, a hub id ``org/repo[@revision][:file]``, the address of a bucket, or a path. A known name
accepts the same suffixes as a hub id.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from ..config.model_settings import DEFAULT_MODEL
from ..errors import CheckpointError, ConfigError
from ..types.model_config import Family
from .bucket.address import BucketAddress, is_address, parse_address
from .files import find_files

BUNDLED = Path(__file__).parent.parent / "bundled"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a hub repository at a revision (branch, tag or commit). ``flag``: the flag that names a copy of it."""

    repo: str
    revision: str
    file: str
    flag: str = "--weights"
    sha256: str | None = None
    """Of the released file."""


@dataclass(frozen=True, slots=True)
class HubCheckpoint:
    """``file``: the weights or their index; None: the first usual name. ``sha256``: of the released ``file``."""

    repo: str
    revision: str = "main"
    file: str | None = None
    sha256: str | None = None


STARMIE = HubFile(
    "moondream/starmie-v1",
    "35192e10a54e36eabe0a7cc57a2c1aab371cafc5",
    "tokenizer.json",
    sha256="0512fdcac4a5f9e7746cbefce4a468dc93bf0f93f11e701b84f8b31bff199e9c",
)
"""The tokenizer of all released models. The files in vikhyatk/moondream2 hold an older vocabulary."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Exactly one of ``path``, ``hub`` and ``bucket`` is set. ``tokenizer``: its location; None: beside the weights.
    ``family``: if the name implies one. ``fp8``: the released checkpoint stores its experts in FP8.
    """

    name: str
    path: Path | None = None
    hub: HubCheckpoint | None = None
    bucket: BucketAddress | None = None
    tokenizer: Path | HubFile | None = None
    family: Family | None = None
    fp8: bool = False


KNOWN: dict[str, ModelSource] = {
    source.name: source
    for source in (
        ModelSource(DEFAULT_MODEL, path=BUNDLED / "kestrel_small", family="moondream3"),
        ModelSource(
            "moondream2",
            hub=HubCheckpoint(
                "vikhyatk/moondream2",
                "9a7d4024050840e001defacec2b00727e89149e6",  # The tag 2025-06-21.
                "model.safetensors",
                "70a7d94c0c8349eb58ed2d9e636ef2d0916960f321ecabeac6354b8ba3d7403f",
            ),
            tokenizer=STARMIE,
            family="moondream2",
        ),
        ModelSource(
            "moondream3-preview",
            hub=HubCheckpoint(
                "moondream/moondream3-preview", "main", "model.safetensors.index.json"
            ),
            tokenizer=STARMIE,
            family="moondream3",
        ),
        ModelSource(
            "moondream3.1-9b-a2b",
            hub=HubCheckpoint("moondream/moondream3.1-9B-A2B", "main", "model.safetensors"),
            tokenizer=STARMIE,
            family="moondream3",
            fp8=True,
        ),
    )
}

_REFERENCE = re.compile(r"^(?P<base>[^@:]+)(?:@(?P<revision>[^:]+))?(?::(?P<file>[^:]+))?$")
_REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
_PATH_START = ("/", "./", "../", "~", ".\\", "..\\")
_PATH_END = (".safetensors", ".pt", ".pth", ".safetensors.index.json")


def resolve(
    model: str, model_path: str | Path | None = None, tokenizer_path: str | Path | None = None
) -> ModelSource:
    """Returns the source of ``model``, or of ``model_path`` if given. Raises ConfigError with the valid names."""
    if model_path is None:
        source = _from_name(model.strip())
    elif is_address(model_path):
        source = _from_bucket("model_path", str(model_path), model.strip())
    else:
        source = _from_path("model_path", Path(os.path.expanduser(model_path)), model.strip())
    if tokenizer_path is not None:
        source = replace(source, tokenizer=tokenizer_file(tokenizer_path))
    return source


def architecture(
    model: str, model_path: str | Path | None = None
) -> tuple[str, Family | None, Path | None]:
    """Returns (name, family, config.json) of a model for which weights are generated: of a known name, or the path of a
    config.json or its folder. Without one, it has the released shape of its family. Raises ConfigError.
    """
    field = "model" if model_path is None else "model_path"
    name = model.strip()
    known = KNOWN.get(name.lower())
    if model_path is None and known is not None and known.path is None:
        return known.name, known.family, None
    path = Path(os.path.expanduser(name if model_path is None else model_path))
    if model_path is None and known is not None and known.path is not None:
        path = known.path
    file = path if path.suffix == ".json" else path / "config.json"
    if not file.is_file():
        raise ConfigError(
            field,
            str(path) if model_path is not None else model,
            f"random weights need one of {', '.join(KNOWN)}, or the path of a config.json or its folder",
        )
    if known is not None and (model_path is None or known.name != DEFAULT_MODEL):
        return known.name, known.family, file
    return (file.resolve().parent.name if file.name == "config.json" else file.stem), None, file


def random_name(name: str) -> str:
    """The name under which a model with generated weights is served."""
    return f"{name} (random weights)"


def _from_path(field: str, path: Path, name: str) -> ModelSource:
    if not path.exists():
        raise ConfigError(field, str(path), "no such file or folder")
    if path.is_file():
        try:
            find_files(path)
        except CheckpointError as error:
            raise ConfigError(field, str(path), str(error).removeprefix(f"{path}: ")) from error
    known = KNOWN.get(name.lower())
    # The default name does not describe weights that are given by path.
    if known is not None and known.name != DEFAULT_MODEL:
        return ModelSource(known.name, path=path, family=known.family)
    return ModelSource(_name_of(path), path=path)


def _from_bucket(field: str, text: str, name: str) -> ModelSource:
    address = parse_address(field, text)
    known = KNOWN.get(name.lower())
    if known is None or known.name == DEFAULT_MODEL:
        known = KNOWN.get(address.name.lower())
    if known is not None:
        return ModelSource(known.name, bucket=address, family=known.family)
    return ModelSource(address.name, bucket=address)


def _from_name(model: str) -> ModelSource:
    if model.lower() in KNOWN:
        return KNOWN[model.lower()]
    if is_address(model):
        return _from_bucket("model", model, "")
    path = Path(os.path.expanduser(model))
    if model.startswith(_PATH_START) or path.exists():
        return _from_path("model", path, "")
    reference = _REFERENCE.match(model)
    base = reference["base"] if reference else model
    known = KNOWN.get(base.lower())
    if reference and (known and known.hub):
        return replace(known, hub=_at(known.hub, reference["revision"], reference["file"]))
    if reference and _REPO.match(base):
        released = next((s for s in KNOWN.values() if s.hub and s.hub.repo == base), None)
        hub = HubCheckpoint(base, reference["revision"] or "main", reference["file"])
        # A repository of a released model has the released tokenizer, under its hub id as well.
        tokenizer = released.tokenizer if released else None
        return ModelSource(
            model, hub=hub, tokenizer=tokenizer, family=released.family if released else None
        )
    if model.endswith(_PATH_END):
        raise ConfigError("model", model, "no such file")
    near = get_close_matches(model.lower(), KNOWN, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        "model",
        model,
        f"must be one of {', '.join(KNOWN)}, a hub id org/repo[@revision][:file], s3://BUCKET/PREFIX, or a path{hint}",
    )


def is_name(model: str) -> bool:
    """Whether ``model`` is a known name or has the form of a hub id. Does not look at the disk."""
    if model.lower() in KNOWN:
        return True
    reference = _REFERENCE.match(model)
    base = reference["base"] if reference else ""
    return base.lower() in KNOWN or bool(_REPO.match(base) and not base.endswith(_PATH_END))


def _at(hub: HubCheckpoint, revision: str | None, file: str | None) -> HubCheckpoint:
    # Another revision may have other files than the released revision.
    return HubCheckpoint(
        hub.repo, revision or hub.revision, file or (hub.file if not revision else None)
    )


def tokenizer_file(tokenizer_path: str | Path) -> Path:
    """Returns the path of tokenizer.json for the path of the file or of its folder. Raises ConfigError."""
    path = Path(os.path.expanduser(tokenizer_path))
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("tokenizer_path", str(tokenizer_path), "no such tokenizer.json")
    return path


def _name_of(path: Path) -> str:
    """Returns a folder's name, or a file's name without suffix. A file with a usual name gets its folder's name."""
    path = path.resolve()
    if path.is_dir():
        return path.name
    stem = path.name.split(".")[0]
    return path.parent.name if stem in ("model", "pytorch_model") else stem
