"""KeptCrops: the features of crops that later images may reuse. The scheduler decides which ones are kept."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..types.step import EncodeSlice


class KeptCrops:
    """Owns features [patches, enc_dim] on the device, by the content keys of crops. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(features.nbytes for features in self._kept.values())

    def features(self, piece: EncodeSlice, encoded: Tensor | None) -> list[Tensor]:
        """Returns the features of a slice's distinct crops, in order, as tensors [n, patches, enc_dim]. Keeps those
        that the slice asks to keep.

        ``encoded``: [piece.num_encoded, patches, enc_dim], the crops of the slice that are not reused; None if there
        are none.
        """
        if not (piece.reused or piece.kept):
            return [] if encoded is None or not len(encoded) else [encoded]
        keys = piece.image.crop_keys
        assert keys is not None, "crops without keys are not kept"
        found = []
        begin = 0
        for index in piece.distinct:
            if index in piece.reused:
                found.append(self._kept[keys[index]][None])
                continue
            assert encoded is not None
            found.append(encoded[begin : begin + 1])
            if index in piece.kept:
                # A copy, because the features of a step are one tensor.
                self._kept[keys[index]] = encoded[begin].clone()
            begin += 1
        return found

    def drop(self, keys: Iterable[str]) -> None:
        """Drops crops. An unknown key has no effect."""
        for key in keys:
            self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()
