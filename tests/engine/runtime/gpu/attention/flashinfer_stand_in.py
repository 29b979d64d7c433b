"""What we use of FlashInfer's decode wrapper, computed by plain torch: it reads nothing but what `plan` left in the
buffers that it was given, as kernels in a captured graph do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kestrel_engine.runtime.gpu.attention.flashinfer_paged import FlashInfer


class Wrapper:
    made: ClassVar[list[Wrapper]] = []

    def __init__(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
    ) -> None:
        assert layout == "NHD" and use_cuda_graph and workspace.dtype == torch.uint8
        self.bounds, self.pages = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last = paged_kv_last_page_len_buffer
        self.options: dict[str, Any] = {}
        self.made.append(self)

    def plan(self, bounds: Tensor, pages: Tensor, last: Tensor, **options: Any) -> None:
        assert len(last) == len(self.last) and len(pages) <= len(self.pages)
        for buffer, given in ((self.bounds, bounds), (self.pages, pages), (self.last, last)):
            assert given.dtype == torch.int32
            buffer[: len(given)] = given
        self.options = options

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor], *, out: Tensor | None) -> Tensor:
        size = self.options["page_size"]
        assert q.shape == (len(self.last), self.options["num_qo_heads"], self.options["head_dim"])
        keys, values = pools
        assert keys.shape[1:] == values.shape[1:] == (size, *q.shape[1:])
        attended = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        for row, (begin, end) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            seen = int((end - begin - 1) * size + self.last[row])
            k, v = (pool[self.pages[begin:end].long()].flatten(0, 1)[:seen] for pool in pools)
            scores = torch.einsum("hd,phd->hp", q[row].float(), k.float()) * q.shape[-1] ** -0.5
            attended[row] = torch.einsum("hp,phd->hd", scores.softmax(-1), v.float())
        return attended


def stand_in(device: torch.device, dtype: torch.dtype = torch.float32) -> FlashInfer:
    """A FlashInfer of any device and type, whose wrappers are listed in ``Wrapper.made`` from now on."""
    Wrapper.made = []
    made = object.__new__(FlashInfer)
    made.library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    made.device, made.dtype = device, dtype
    made.workspace = torch.zeros(16, dtype=torch.uint8, device=device)
    return made
