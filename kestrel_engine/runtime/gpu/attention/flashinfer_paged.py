"""FlashInfer's paged attention for the text of a prefill pass, and for decode.

All uses share one workspace on the device, because they run one after the other on one stream.

`plan` writes the plan to a pinned buffer, which FlashInfer copies to the device without waiting. The host must not
overwrite that buffer before the copy is done, so each use records an event.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ....errors import ConfigError
from ....models.kv_format import UNSCALED, Scales

if TYPE_CHECKING:
    from ..prefill.batch import TextPart

BACKEND = "fa2"
"""FlashInfer's kernels for prompts. Those of fa3 multiply by zero what lies beyond a sequence's last value. Values of
another sequence may be left there; if one is NaN, so is the product. fa2 writes zeros there."""
_DEPTH = 4
"""Plans of passes that may be in flight."""
WORKSPACE_BYTES = 128 << 20
"""The size that FlashInfer recommends for split-KV results."""
DTYPES = (torch.bfloat16, torch.float16)


class PlannedText(Protocol):
    """Attention of a pass's text, in one layer."""

    def __call__(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scales: Scales = UNSCALED
    ) -> None:
        """Writes the attention output to ``out`` [n, H*D].

        ``q``: [n, H, D], the text's queries. ``keys``, ``values``: the layer's pools [num_slots, H, D], with
        ``scales``.
        """
        ...


@dataclass(frozen=True, slots=True)
class PageIndices:
    """FlashInfer's page table: int32 arrays on the host. ``pages``: the pages of all sequences, end to end; sequence i
    has those from ``bounds[i]`` to ``bounds[i + 1]``. ``last``: [n], the positions in its last page, 1..page_size."""

    pages: np.ndarray
    bounds: np.ndarray
    last: np.ndarray


def page_indices(
    page_tables: Sequence[tuple[int, ...]], lengths: Sequence[int], page_size: int
) -> PageIndices:
    """Returns the indices for sequences of ``lengths`` positions, each at least 1. A page table may hold more pages."""
    ends = np.array(lengths, dtype=np.int32)
    used = -(-ends // page_size)
    bounds = np.zeros(len(ends) + 1, dtype=np.int32)
    np.cumsum(used, out=bounds[1:])
    pages = np.empty(bounds[-1], dtype=np.int32)
    for table, begin, count in zip(page_tables, bounds, used, strict=False):
        pages[begin : begin + count] = table[:count]
    return PageIndices(pages, bounds, (ends - 1) % page_size + 1)


class FlashInfer:
    """The imported package and its workspace.

    Raises ConfigError without the package, and for a dtype or device that it does not support.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cuda" or dtype not in DTYPES:
            raise ConfigError(
                "attention",
                "flashinfer",
                f"needs CUDA and bfloat16 or float16, not {dtype} on {device}",
            )
        try:
            self.library: Any = importlib.import_module("flashinfer")
        except ImportError as error:
            raise ConfigError(
                "attention",
                "flashinfer",
                f"{error}; install flashinfer-python (pip install ./clients/python '.[flashinfer]' in the repository)",
            ) from error
        self.device, self.dtype = device, dtype
        # The decode wrapper keeps counters in the workspace, which must start at zero.
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Ring:
    """Wrappers that are planned in turn, so that a plan rarely waits for the copy of an earlier plan."""

    def __init__(self, wrappers: Sequence[Any]) -> None:
        self._wrappers = wrappers
        self._copied: list[torch.cuda.Event | None] = [None] * len(wrappers)
        self._next = 0

    def plan(self, *arrays: Tensor, **options: Any) -> Any:
        """Plans the next wrapper and returns it."""
        index, self._next = self._next, (self._next + 1) % len(self._wrappers)
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        wrapper = self._wrappers[index]
        wrapper.plan(*arrays, **options)
        # On a CPU, memory is not pinned and there is nothing to wait for.
        if arrays[0].is_pinned():
            event = torch.cuda.Event()
            event.record()
            self._copied[index] = event
        return wrapper


class FlashInferText:
    """Causal attention of a pass's text over the pages, planned once a pass and run for each layer."""

    def __init__(self, flashinfer: FlashInfer) -> None:
        self._flashinfer = flashinfer
        make = flashinfer.library.BatchPrefillWithPagedKVCacheWrapper
        self._ring = _Ring(
            [make(flashinfer.workspace, "NHD", backend=BACKEND) for _ in range(_DEPTH)]
        )

    def plan(
        self, parts: Sequence[TextPart], num_heads: int, head_dim: int, page_size: int
    ) -> PlannedText:
        """Plans a pass over ``parts``, whose queries follow one another in this order."""
        lengths = [part.start + part.count for part in parts]
        indices = page_indices([part.page_table for part in parts], lengths, page_size)
        device = self._flashinfer.device
        queries = np.zeros(len(parts) + 1, dtype=np.int32)
        np.cumsum([part.count for part in parts], out=queries[1:])
        wrapper = self._ring.plan(
            _pinned(queries, device),
            _pinned(indices.bounds, device),
            _pinned(indices.pages, device),
            _pinned(indices.last, device),
            num_qo_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim_qk=head_dim,
            page_size=page_size,
            causal=True,
            q_data_type=self._flashinfer.dtype,
            kv_data_type=self._flashinfer.dtype,
        )

        def attend(
            q: Tensor, keys: Tensor, values: Tensor, out: Tensor, scales: Scales = UNSCALED
        ) -> None:
            assert scales == UNSCALED, "FlashInfer reads the model's dtype only"
            _run(wrapper, q, ((_paged(keys, page_size), _paged(values, page_size)),), out)

        return attend


class FlashInferDecode:
    """Attention of one query a row, for a fixed number of rows. A CUDA graph can capture it; plan before each replay.

    Queries must be rotated, and the new keys and values stored (kernels/attention/rope_store.py).
    """

    def __init__(
        self,
        flashinfer: FlashInfer,
        *,
        rows: int,
        max_pages: int,
        num_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """``max_pages``: the most pages of all rows together."""
        self._flashinfer, self.rows, self._page_size = flashinfer, rows, page_size
        self._num_heads, self._head_dim = num_heads, head_dim

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=flashinfer.device)

        self._wrapper = flashinfer.library.BatchDecodeWithPagedKVCacheWrapper(
            flashinfer.workspace,
            "NHD",
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffer(rows + 1),
            paged_kv_indices_buffer=buffer(max_pages),
            paged_kv_last_page_len_buffer=buffer(rows),
        )
        self._ring = _Ring([self._wrapper])

    def plan(self, page_tables: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> None:
        """Plans a step. ``lengths``: [rows], including the new token. Padding has a spare page and length 1."""
        assert len(page_tables) == len(lengths) == self.rows
        device = self._flashinfer.device
        indices = page_indices(page_tables, lengths, self._page_size)
        self._ring.plan(
            _pinned(indices.bounds, device),
            # Only the device reads the pages. If they were on the host, FlashInfer would copy them to its buffer and
            # wait for the device.
            _pinned(indices.pages, device).to(device, non_blocking=True),
            _pinned(indices.last, device),
            num_qo_heads=self._num_heads,
            num_kv_heads=self._num_heads,
            head_dim=self._head_dim,
            page_size=self._page_size,
            q_data_type=self._flashinfer.dtype,
            kv_data_type=self._flashinfer.dtype,
        )

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Writes the attention output to ``out`` [rows, H*D].

        ``q``: [rows, H, D]. ``keys``, ``values``: [num_slots, H, D] of one layer.
        """
        pools = _paged(keys, self._page_size), _paged(values, self._page_size)
        _run(self._wrapper, q, (pools,), out)


def _run(wrapper: Any, q: Tensor, keys_and_values: tuple[Any, ...], out: Tensor) -> None:
    # FlashInfer writes contiguous output only.
    shaped = out.view(q.shape) if out.is_contiguous() else None
    attended = wrapper.run(q, *keys_and_values, out=shaped)
    if shaped is None:
        out.copy_(attended.flatten(1))


def _paged(pool: Tensor, page_size: int) -> Tensor:
    """Returns ``pool`` [num_slots, H, D] as a view [num_pages, page_size, H, D]."""
    return pool.view(-1, page_size, *pool.shape[1:])


def _pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """Returns ``array`` in pinned memory on CUDA, so that copies don't wait. torch keeps it until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
