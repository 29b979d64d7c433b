"""FusedMoe: the experts of one layer behind one call, which picks the decode or the prefill path by the batch.

Up to 64 tokens the weights' bytes are what takes time: moe_decode streams them once. Beyond that moe_prefill multiplies
grouped tiles. FP8 experts may have a bfloat16 copy (``wide``), which prefill reads where tokens are many enough that
converting weights in the loop would cost more than their additional bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .moe_decode import MAX_TOKENS, moe_decode
from .moe_prefill import moe_prefill
from .moe_route import route
from .moe_tile import Experts, upcast_experts

__all__ = ["Experts", "FusedMoe", "moe_decode", "moe_prefill", "route", "upcast_experts"]

# Mean pairs of an expert from which the bfloat16 copy pays; benchmarks/kernels/moe.py measures both.
WIDE_FROM_MEAN_PAIRS = 96


@dataclass(frozen=True, slots=True)
class FusedMoe:
    """Experts and how many of them a token gets."""

    experts: Experts
    experts_per_token: int

    def is_decode(self, num_tokens: int) -> bool:
        """Whether a batch takes the decode path, whose result is parts."""
        return num_tokens <= MAX_TOKENS

    def wants_wide(self, num_tokens: int) -> bool:
        """Whether a prefill of so many tokens is better off with a bfloat16 copy of FP8 experts."""
        pairs = num_tokens * self.experts_per_token
        return self.experts.is_fp8 and pairs > WIDE_FROM_MEAN_PAIRS * self.experts.num_experts

    def parts(self, u: Tensor, router_logits: Tensor, *, out: Tensor | None = None) -> Tensor:
        """``u`` [T <= 64, D] -> [k, T, D] float32, to be summed in order (see moe_decode)."""
        weights, chosen = route(router_logits, self.experts_per_token)
        e = self.experts
        return moe_decode(u, weights, chosen, e.fc1, e.fc2, e.fc1_scale, e.fc2_scale, out=out)

    def __call__(
        self,
        u: Tensor,
        router_logits: Tensor,
        *,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
        wide: Experts | None = None,
    ) -> Tensor:
        """``u`` [T, D], ``router_logits`` [T, E] -> [T, D] (+ ``add_to``, which ``out`` may be); any T.

        ``wide``: Experts.upcast() of these experts, used as ``wants_wide`` says.
        """
        if u.shape[0] and self.is_decode(u.shape[0]):
            total = self.parts(u, router_logits).sum(0)
            if add_to is not None:
                total += add_to
            return total.to(u.dtype) if out is None else out.copy_(total)
        weights, chosen = route(router_logits, self.experts_per_token)
        e = wide if wide is not None and self.wants_wide(u.shape[0]) else self.experts
        if e is wide and u.dtype != e.fc1.dtype:
            raise ValueError(f"a {e.fc1.dtype} copy of experts for {u.dtype} tokens")
        return moe_prefill(
            u, weights, chosen, e.fc1, e.fc2, e.fc1_scale, e.fc2_scale, add_to=add_to, out=out
        )


def random_experts(
    num_experts: int,
    dim: int,
    inner: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    fp8: bool = False,
) -> Experts:
    """Experts whose outputs keep the size of their inputs, for benchmarks."""
    fc1 = torch.randn((num_experts, 2 * inner, dim), device=device, dtype=dtype)
    fc2 = torch.randn((num_experts, dim, inner), device=device, dtype=dtype)
    if not fp8:
        return Experts(fc1 * dim**-0.5, fc2 * inner**-0.5)
    return Experts(
        fc1.to(torch.float8_e4m3fn),
        fc2.to(torch.float8_e4m3fn),
        (torch.rand((num_experts, 2 * inner), device=device) + 0.5) * dim**-0.5,
        (torch.rand((num_experts, dim), device=device) + 0.5) * inner**-0.5,
    )
