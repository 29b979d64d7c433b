"""Random decode batches over poisoned pools, and what plain torch in float64 makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kestrel_engine.kernels.attention.paged_decode import DecodeWorkspace, paged_decode


@dataclass(frozen=True)
class Case:
    """Arguments of paged_decode. Slots that nobody may read hold NaN, each row's own new slot among them."""

    qkv: Tensor
    keys: Tensor
    values: Tensor
    page_table: Tensor
    row_seq: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    page_size: int
    tau: tuple[Tensor, Tensor] | None
    num_heads: int
    head_dim: int

    def decoded(
        self,
        workspace: DecodeWorkspace,
        *,
        splits: int = 1,
        out: Tensor | None = None,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """The kernel's answer, in ``out``. Without ``keys`` and ``values``, the case's own pools get the new token."""
        if out is None:
            out = self.qkv.new_full(
                (len(self.positions), self.num_heads * self.head_dim), torch.nan
            )
        return paged_decode(
            self.qkv,
            self.keys if keys is None else keys,
            self.values if values is None else values,
            self.page_table,
            self.row_seq,
            self.positions,
            self.cos,
            self.sin,
            page_size=self.page_size,
            tau=self.tau,
            splits=splits,
            workspace=workspace,
            out=out,
            **more,
        )

    def workspace(self, splits: int = 1) -> DecodeWorkspace:
        made = [(len(self.positions), splits)]
        return DecodeWorkspace.allocate(made, self.num_heads, self.head_dim, self.qkv.device)

    @classmethod
    def make(
        cls,
        positions: list[int],
        *,
        page_size: int,
        tau: bool,
        num_heads: int = 4,
        head_dim: int = 16,
        rotary: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        extra_columns: int = 0,
        row_seq: list[int] | None = None,
        seed: int = 0,
    ) -> Case:
        g = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        row_seq = list(range(len(positions))) if row_seq is None else row_seq
        num_seqs = max(row_seq) + 1
        pages_each = max(positions) // page_size + 2
        num_pages = num_seqs * pages_each + 3
        pages = torch.randperm(num_pages, generator=g)[: num_seqs * pages_each]
        table = pages.view(num_seqs, pages_each).to(torch.int32)
        keys = torch.full((num_pages * page_size, num_heads, head_dim), float("nan"))
        values = keys.clone()
        for seq, position in zip(row_seq, positions, strict=True):
            for p in range(position):
                slot = int(table[seq, p // page_size]) * page_size + p % page_size
                keys[slot], values[slot] = normal(num_heads, head_dim), normal(num_heads, head_dim)
        # Entries past a row's last page may hold anything: they are out of bounds on purpose.
        for seq, position in zip(row_seq, positions, strict=True):
            table[seq, position // page_size + 1 :] = 1 << 20
        rotary = head_dim // 2 if rotary is None else rotary
        angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(rotary // 2) / rotary))
        rows, dim = len(positions), num_heads * head_dim
        content = None
        if tau:
            content = (
                normal(rows, 2 * num_heads + 3)[:, : 2 * num_heads].to(device, dtype),
                normal(num_heads).to(device),
            )
        return cls(
            qkv=normal(rows, 3 * dim + extra_columns).to(device, dtype),
            keys=keys.to(device, dtype),
            values=values.to(device, dtype),
            page_table=table.to(device),
            row_seq=torch.tensor(row_seq, dtype=torch.int32, device=device),
            positions=torch.tensor(positions, dtype=torch.int32, device=device),
            cos=angles.cos().to(device),
            sin=angles.sin().to(device),
            page_size=page_size,
            tau=content,
            num_heads=num_heads,
            head_dim=head_dim,
        )

    def slots(self, row: int, end: int) -> Tensor:
        """[end] int64: where positions 0 up to ``end`` of a row's sequence lie."""
        table = self.page_table[int(self.row_seq[row])].long()
        at = torch.arange(end, device=table.device)
        return table[at // self.page_size] * self.page_size + at % self.page_size

    def own_slots(self) -> Tensor:
        """[rows] int64: where each row's new key and value go."""
        ends = [int(p) + 1 for p in self.positions]
        return torch.stack([self.slots(row, end)[-1] for row, end in enumerate(ends)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """[T, H, D] float64, turned by the angles at ``positions`` [T]."""
    half = cos.shape[-1]
    c, s = (t[positions.long()].double()[:, None] for t in (cos, sin))
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * c - b * s, a * s + b * c, x[..., 2 * half :]], dim=-1)


def tau_factors(tau: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of q and of v, each [T, H, 1] float64 (models/text.py, Tau.factors)."""
    content, alpha = tau
    place = 0.5 + torch.sigmoid(alpha.double() * positions.double().log1p()[:, None])
    of_q, of_v = torch.tanh(content.double()).chunk(2, dim=-1)
    return (of_q + place)[..., None], (of_v + place)[..., None]


def prepared(
    qkv: Tensor, case_heads: int, head_dim: int, cos: Tensor, sin: Tensor, positions: Tensor,
    tau: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v [T, H, D] float64 as attention wants them: scaled by tau and turned."""
    x = qkv[:, : 3 * case_heads * head_dim].double().view(len(qkv), 3 * case_heads, head_dim)
    q, k, v = x.chunk(3, dim=1)
    if tau is not None:
        of_q, of_v = tau_factors(tau, positions)
        q, v = q * of_q, v * of_v
    return rotate(q, cos, sin, positions), rotate(k, cos, sin, positions), v


def decode_reference(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Attention [M, H*D], and the new keys and values [M, H, D], float64."""
    q, k, v = prepared(
        case.qkv, case.num_heads, case.head_dim, case.cos, case.sin, case.positions, case.tau
    )
    rows = []
    for row, position in enumerate(case.positions.tolist()):
        slots = case.slots(row, position)
        seen_k = torch.cat([case.keys[slots].double(), k[row : row + 1]])
        seen_v = torch.cat([case.values[slots].double(), v[row : row + 1]])
        scores = torch.einsum("hd,phd->hp", q[row], seen_k) * case.head_dim**-0.5
        rows.append(torch.einsum("hp,phd->hd", scores.softmax(-1), seen_v).flatten())
    return torch.stack(rows), k, v


def relative_error(out: Tensor, expected: Tensor) -> float:
    """||out - expected|| / ||expected||; NaN never passes a comparison."""
    return float((out.double() - expected).norm() / expected.norm())
