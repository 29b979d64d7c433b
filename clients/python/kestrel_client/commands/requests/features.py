"""The files of features: what ``embed --save FILE.npy`` writes, and ``--features FILE.npy`` sends in place of an image.

A file is numpy's, of one record: the image's size, the adapter, and the array, which ``numpy.load(FILE)["features"]``
reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kestrel_client import ImageFeatures, ImageSize
from kestrel_client.errors import KestrelError
from kestrel_client.values.results.exports import package

from ..files import file_errors
from ..parser import CommandError

SUFFIX = ".npy"
FLAG = "--features FILE.npy  send the features that 'embed --save FILE.npy' wrote, in place of an image"
_MOST_BYTES = 256 * 2**20
_MOST_NAME = 256
_DTYPES = {2: "<f2", 4: "<f4"}


def write_features(path: Path, features: ImageFeatures) -> None:
    """Raises CommandError."""
    np = package("numpy")
    shape = (features.rows, features.dimensions)
    number = _DTYPES[len(features.data) // (features.rows * features.dimensions)]
    fields = [("size", "<i4", 2), ("adapter", f"<U{_MOST_NAME}"), ("features", number, shape)]
    record = np.zeros((), np.dtype(fields))
    record["size"], record["adapter"] = features.size, features.adapter
    record["features"] = np.frombuffer(features.data, number).reshape(shape)
    with file_errors("write", path), path.open("wb") as file:
        np.save(file, record, allow_pickle=False)


def read_features(name: str) -> ImageFeatures:
    """Raises CommandError."""
    np = package("numpy")
    try:
        if (size := Path(name).stat().st_size) > _MOST_BYTES:
            raise CommandError(f"{name!r} has {size} bytes; features have at most {_MOST_BYTES}")
        record: Any = np.load(name, mmap_mode="r", allow_pickle=False)
        width, height = map(int, record["size"])
        return ImageFeatures.from_array(
            np.ascontiguousarray(record["features"]),
            ImageSize(width, height),
            str(record["adapter"]),
        )
    except OSError as error:
        raise CommandError(f"cannot read {name!r}: {error.strerror or error}") from None
    except (EOFError, IndexError, KeyError, TypeError, ValueError, KestrelError) as error:
        # numpy's own advice about a file that it does not know is to read it without checks.
        why = "" if "pickle" in str(error) else f": {error}"
        raise CommandError(
            f"{name!r} is not a file that 'embed --save FILE.npy' wrote{why}"
        ) from None
