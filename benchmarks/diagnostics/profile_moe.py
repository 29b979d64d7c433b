"""Runs one MoE layer repeatedly, for a profiler. Nothing else runs between the warm-up and the end.

    python -m benchmarks.diagnostics.profile_moe --mode prefill|decode [--iterations N] [--refresh-routing] [--nvtx]

Prefill runs one image with its question (832 tokens), and decode runs four sequences. Both include the router and use
the kernels of the server. Without --refresh-routing, every iteration uses the same experts, whose weights are then in
the cache. With --nvtx, the measured iterations form a range "moe" for Nsight Compute: ncu --nvtx --nvtx-include "moe/"
python -m benchmarks.diagnostics.profile_moe --nvtx. On a CPU, Triton's interpreter runs the kernels in float32, so use
tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

TOKENS = {"prefill": 832, "decode": 4}
MAX_DECODED = 64
"""moe_decode.MAX_TOKENS; kernels are imported only once it's known how they run."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mode", choices=sorted(TOKENS), default="prefill")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup-iters", type=int, default=5)
    parser.add_argument(
        "--refresh-routing", action="store_true", help="use new random tokens in each iteration"
    )
    parser.add_argument("--nvtx", action="store_true", help='mark the iterations as range "moe"')
    parser.add_argument(
        "--tokens",
        type=int,
        help="number of tokens [832 for prefill, 4 for decode; decode: up to 64]",
    )
    parser.add_argument(
        "--format", choices=["fp8", "bf16"], default="fp8", help="format of the experts"
    )
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--experts-per-token", type=int, default=8)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=1024)
    args = parser.parse_args(arguments)
    if args.iterations < 1 or args.warmup_iters < 0:
        parser.error("--iterations must be at least 1, --warmup-iters at least 0")
    if args.mode == "decode" and args.tokens is not None and not 1 <= args.tokens <= MAX_DECODED:
        parser.error(f"--tokens {args.tokens}: decode's kernels take 1 to {MAX_DECODED}")
    return args


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Runs, prints and returns the milliseconds of each measured iteration."""
    args = parse(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined
    from benchmarks.kernels.random_experts import random_experts
    from kestrel_engine.kernels.moe.decode import moe_decode
    from kestrel_engine.kernels.moe.prefill import moe_prefill
    from kestrel_engine.kernels.moe.route import route
    from kestrel_engine.kernels.moe.router import RouterWorkspace, route_tokens

    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    tokens = args.tokens or TOKENS[args.mode]
    e = random_experts(
        args.experts, args.dim, args.inner, dtype=dtype, device=device, fp8=args.format == "fp8"
    )
    layer = (e.fc1, e.fc2, e.fc1_scale, e.fc2_scale)
    router = torch.randn(args.experts, args.dim, device=device, dtype=dtype) * args.dim**-0.5
    u = torch.randn(tokens, args.dim, device=device, dtype=dtype)
    residual = torch.randn_like(u)
    workspace = RouterWorkspace(MAX_DECODED, args.experts, dtype, torch.device(device))

    def iterate() -> float:
        if args.refresh_routing:
            u.normal_()
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        if args.mode == "decode":
            routed = route_tokens(u, router, None, args.experts_per_token, workspace)
            moe_decode(u, *routed, *layer)
        else:
            routed = route(F.linear(u, router), args.experts_per_token)
            moe_prefill(u, *routed, *layer, add_to=residual, out=residual)
        if on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    for _ in range(args.warmup_iters):
        iterate()
    marked = torch.cuda.nvtx.range("moe") if args.nvtx and on_gpu else contextlib.nullcontext()
    with marked:
        times = [iterate() for _ in range(args.iterations)]
    print(
        f"{args.mode}: {tokens} tokens, {args.experts} experts ({args.format}), {args.experts_per_token} a token:"
        f" {statistics.median(times):.3f} ms (launches included), {len(times)} iterations on {device}"
    )
    return times


if __name__ == "__main__":
    main()
