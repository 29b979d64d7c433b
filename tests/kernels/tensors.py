"""Random tensors on the device of these tests, and tensors of NaN."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Interpreted, bfloat16 arithmetic is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
