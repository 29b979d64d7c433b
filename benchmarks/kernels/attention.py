"""Measures attention on a GPU: paged decode by every candidate and by FlashInfer, image blocks, paged text, crops.

    python -m benchmarks.kernels.attention [--quick] [--fp8] [--json PATH]

Candidates are first compared with float32; the exit status is 1 if one is wrong. Decode times are microseconds a layer:
the median replay of a captured graph of 24 layers, each with its own keys and values, which exceed the L2 cache. Our
kernel includes RoPE and the store; FlashInfer's attention is shown with and without the kernel that does both. With
--fp8, only decode is measured, with an FP8 KV cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.linear import microseconds, relative_error
from kestrel_engine.errors import ConfigError
from kestrel_engine.kernels.attention.paged_decode import (
    DecodeConfig,
    DecodeWorkspace,
    candidates,
    choose_splits,
    paged_decode,
)
from kestrel_engine.kernels.attention.rope_store import rope_store
from kestrel_engine.runtime.gpu.attention.blocks import BlockAttention
from kestrel_engine.runtime.gpu.attention.flashinfer_paged import (
    FlashInfer,
    FlashInferBlocks,
    FlashInferDecode,
    FlashInferText,
)
from kestrel_engine.runtime.gpu.attention.prefill import AttentionChoice, PrefillAttention
from kestrel_engine.runtime.gpu.prefill.batch import TextPart

LAYERS, HEADS, SIZE, ROTARY, PAGE = 24, 32, 64, 32, 10
DIM = HEADS * SIZE
LENGTH = 800
BLOCK = 730
DTYPE = torch.bfloat16
SPLITS = {1: (8, 16), 4: (4, 8, 16), 16: (1, 2, 4, 8), 32: (1, 2, 4), 64: (1, 2, 4)}
LIMIT = 6e-3
E4M3 = torch.float8_e4m3fn
SCALES = (0.5, 0.25)
"""Of keys and values in FP8."""


@dataclass(frozen=True)
class Batch:
    """The rows' page tables [rows, pages] over pools [LAYERS, slots, H, D], and a qkv [rows, 3*H*D] for each layer."""

    keys: Tensor
    values: Tensor
    page_table: Tensor
    positions: Tensor
    qkv: Tensor
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def rows(self) -> int:
        return len(self.positions)

    def first(self, rows: int) -> Batch:
        return Batch(
            self.keys,
            self.values,
            self.page_table[:rows],
            self.positions[:rows],
            self.qkv[:, :rows],
            self.scales,
        )


class Tables:
    """cos and sin, row numbers, and the splits' workspace."""

    def __init__(self, rows: int) -> None:
        device = torch.device("cuda")
        exponents = torch.arange(0, ROTARY, 2, device=device) / ROTARY
        angles = torch.outer(torch.arange(2048.0, device=device), 1.5e6**-exponents)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.row_seq = torch.arange(rows, dtype=torch.int32, device=device)
        self.workspace = DecodeWorkspace.allocate([(rows, 16)], HEADS, SIZE, device)


def make_batch(rows: int, layers: int, positions: list[int], pool: torch.dtype = DTYPE) -> Batch:
    pages = LENGTH // PAGE + 1
    order = torch.randperm(rows * pages, device="cuda").to(torch.int32)
    shape = (layers, rows * pages * PAGE, HEADS, SIZE)
    keys, values = (torch.empty(shape, dtype=pool, device="cuda") for _ in range(2))
    for layer in (*keys, *values):
        layer.copy_(torch.randn(layer.shape, device="cuda"))
    return Batch(
        keys,
        values,
        order.view(rows, pages),
        torch.tensor(positions, dtype=torch.int32, device="cuda"),
        torch.randn(layers, rows, 3 * DIM, dtype=DTYPE, device="cuda"),
        SCALES if pool == E4M3 else (1.0, 1.0),
    )


def ours(
    batch: Batch,
    tables: Tables,
    layer: int,
    out: Tensor,
    config: DecodeConfig | None,
    splits: int,
    pdl: bool,
    tau: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    return paged_decode(
        batch.qkv[layer],
        batch.keys[layer],
        batch.values[layer],
        batch.page_table,
        tables.row_seq[: batch.rows],
        batch.positions,
        tables.cos,
        tables.sin,
        page_size=PAGE,
        tau=tau,
        scales=batch.scales,
        splits=splits,
        workspace=tables.workspace,
        out=out,
        config=config,
        pdl=pdl,
    )


def slots_of(batch: Batch, row: int, end: int) -> Tensor:
    at = torch.arange(end, device="cuda")
    return batch.page_table[row].long()[at // PAGE] * PAGE + at % PAGE


def reference(batch: Batch, tables: Tables, tau: tuple[Tensor, Tensor] | None) -> Tensor:
    """Returns attention of layer 0, [rows, H*D] float32. The new keys and values come from qkv."""
    at = batch.positions.long()
    q, k, v = batch.qkv[0].float().view(batch.rows, 3 * HEADS, SIZE).chunk(3, dim=1)
    if tau is not None:
        content, alpha = tau
        place = 0.5 + torch.sigmoid(alpha * at.float().log1p()[:, None])
        of_q, of_v = torch.tanh(content.float()).chunk(2, dim=-1)
        q, v = q * (of_q + place)[..., None], v * (of_v + place)[..., None]
    cos, sin = tables.cos[at][:, None], tables.sin[at][:, None]

    def turn(x: Tensor) -> Tensor:
        a, b = x[..., : ROTARY // 2], x[..., ROTARY // 2 : ROTARY]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, x[..., ROTARY:]], dim=-1)

    of_keys, of_values = batch.scales

    def kept(x: Tensor, scale: float) -> Tensor:
        return (x / scale).clamp(-448, 448).to(batch.keys.dtype).float() * scale

    q, k, v = turn(q), kept(turn(k), of_keys), kept(v, of_values)
    rows = []
    for row, position in enumerate(batch.positions.tolist()):
        old = slots_of(batch, row, position)
        seen_k = torch.cat([batch.keys[0, old].float() * of_keys, k[row : row + 1]])
        seen_v = torch.cat([batch.values[0, old].float() * of_values, v[row : row + 1]])
        scores = torch.einsum("hd,phd->hp", q[row], seen_k) * SIZE**-0.5
        rows.append(torch.einsum("hp,phd->hd", scores.softmax(-1), seen_v).flatten())
    return torch.stack(rows)


def check_decode(tried: list[DecodeConfig], pool: torch.dtype) -> float:
    """Checks mixed lengths, tau, splits, with and without PDL. Returns the largest error. Exits if one is wrong."""
    positions = [0, 1, 63, 799, 400, 730]
    batch, tables = make_batch(len(positions), 1, positions, pool), Tables(len(positions))
    content = torch.randn(len(positions), 2 * HEADS, dtype=DTYPE, device="cuda")
    tau = (content, torch.randn(HEADS, device="cuda"))
    worst = 0.0
    for with_tau in (None, tau):
        wanted = reference(batch, tables, with_tau)
        for config in tried:
            for splits, pdl in ((1, False), (3, True), (16, False), (16, True)):
                out = torch.full((len(positions), DIM), torch.nan, dtype=DTYPE, device="cuda")
                ours(batch, tables, 0, out, config, splits, pdl, with_tau)
                error = relative_error(out, wanted)
                if not error < LIMIT or bool(tables.workspace.arrived.any()):
                    sys.exit(f"WRONG: {config} splits={splits} pdl={pdl}: {error:.2e}")
                worst = max(worst, error)
    return worst


def compile_some(tried: list[DecodeConfig], pool: torch.dtype) -> None:
    """Compiles kernels in a separate process, which fills Triton's cache on disk."""
    batch, tables = make_batch(2, 1, [5, 700], pool), Tables(2)
    out = torch.empty(2, DIM, dtype=DTYPE, device="cuda")
    content = torch.zeros(2, 2 * HEADS, dtype=DTYPE, device="cuda")
    alpha = torch.zeros(HEADS, device="cuda")
    for config in tried:
        for splits, pdl, tau in ((1, False, False), (1, True, False), (2, False, False),
                                 (2, True, False), (1, False, True), (3, True, True),
                                 (16, False, True), (16, True, True)):  # fmt: skip
            ours(batch, tables, 0, out, config, splits, pdl, (content, alpha) if tau else None)


def compile_all(tried: list[DecodeConfig], kind: torch.dtype) -> None:
    workers = min(12, multiprocessing.cpu_count(), len(tried))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.starmap(compile_some, [(tried[i::workers], kind) for i in range(workers)], chunksize=1)


def copy_rate() -> float:
    """Returns the bytes a second, read and written, of a large copy."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / microseconds(lambda: target.copy_(source), 1) * 1e6


def time_decode(
    batch: Batch,
    tables: Tables,
    tried: list[DecodeConfig],
    rate: float,
    flashinfer: FlashInfer | None,
) -> list[dict[str, Any]]:
    """Times all candidates at one batch size, the fastest first."""
    rows = batch.rows
    kind = batch.keys.dtype
    floor = rows * LENGTH * DIM * 2 * kind.itemsize / rate * 1e6
    out = torch.empty(rows, DIM, dtype=DTYPE, device="cuda")
    found = []

    def add(what: str, us: float, **more: Any) -> None:
        share = f"{floor / us:.0%}"
        found.append({"rows": rows, "what": what, "us": round(us, 2), "of copy": share, **more})

    for config in tried:
        for splits in SPLITS[rows] if rows in SPLITS else (1, 2):
            for pdl in (False, True):

                def layers(c: DecodeConfig = config, s: int = splits, p: bool = pdl) -> None:
                    for layer in range(LAYERS):
                        ours(batch, tables, layer, out, c, s, p)

                name = f"{config.heads}x{config.block} w{config.num_warps} s{config.stages}"
                name += f"{' ahead' if config.ahead else ''} m{config.merge}"
                us = microseconds(layers, LAYERS)
                add(f"{name} /{splits}{' pdl' if pdl else ''}", us, config=asdict(config))

    default = choose_splits(rows, HEADS, SIZE, kind)

    def as_served() -> None:
        for layer in range(LAYERS):
            ours(batch, tables, layer, out, None, default, True)

    add(f"default /{default} pdl", microseconds(as_served, LAYERS))
    if flashinfer is not None:
        add_flashinfer(batch, tables, flashinfer, out, add)
    return sorted(found, key=lambda row: row["us"])


def add_flashinfer(
    batch: Batch, tables: Tables, library: FlashInfer, out: Tensor, add: Callable[..., None]
) -> None:
    rows = batch.rows
    decode = FlashInferDecode(
        library,
        rows=rows,
        max_pages=batch.page_table.numel(),
        num_heads=HEADS,
        head_dim=SIZE,
        page_size=PAGE,
    )
    lengths = [position + 1 for position in batch.positions.tolist()]
    decode.plan([tuple(table) for table in batch.page_table.tolist()], lengths)
    positions = batch.positions.long()
    slots = torch.stack([slots_of(batch, row, end)[-1] for row, end in enumerate(lengths)])
    heads = [qkv.view(rows, 3 * HEADS, SIZE)[:, :HEADS] for qkv in batch.qkv]

    def attend() -> None:
        for layer in range(LAYERS):
            decode(heads[layer], batch.keys[layer], batch.values[layer], out)

    def with_store() -> None:
        for layer in range(LAYERS):
            keys, values = batch.keys[layer], batch.values[layer]
            rope_store(batch.qkv[layer], positions, slots, keys, values, tables.cos, tables.sin)
            decode(heads[layer], keys, values, out)

    add("FlashInfer, attention alone", microseconds(attend, LAYERS))
    kept = batch.qkv.clone()
    add("FlashInfer with rope_store", microseconds(with_store, LAYERS))
    batch.qkv.copy_(kept)


@dataclass(frozen=True)
class Pass:
    """The fields of a batch that `PrefillAttention` reads."""

    blocks: tuple[str, ...]
    block_length: int
    text: tuple[TextPart, ...]


def time_prefill(library: FlashInfer | None, quick: bool) -> list[dict[str, Any]]:
    """Times image blocks by backend, text by library, and the kernel before them."""
    found: list[dict[str, Any]] = []
    choices = {
        "torch flash": AttentionChoice(
            own_blocks=BlockAttention(False, SDPBackend.FLASH_ATTENTION)
        ),
        "torch cuDNN": AttentionChoice(
            own_blocks=BlockAttention(False, SDPBackend.CUDNN_ATTENTION)
        ),
        "our own kernel": AttentionChoice(own_blocks=BlockAttention(True)),
    }
    if library is not None:
        text, blocks = FlashInferText(library), FlashInferBlocks(library)
        choices[f"FlashInfer {library.backend}"] = AttentionChoice(library, text, blocks)
    pages = 64 * (BLOCK + 30) // PAGE
    pools = [
        torch.randn(1, pages * PAGE, HEADS, SIZE, dtype=DTYPE, device="cuda") for _ in range(2)
    ]
    order = torch.randperm(pages).tolist()
    each = pages // 64
    parts = tuple(
        TextPart(25 * i, 25, BLOCK, tuple(order[i * each : (i + 1) * each])) for i in range(64)
    )
    cases = [(f"{n} blocks of {BLOCK}", Pass(("",) * n, BLOCK, ())) for n in (1, 8, 16)]
    cases.append((f"text, 64 x 25 over {BLOCK}", Pass((), BLOCK, parts)))
    for name, made in cases:
        found += time_case(name, made, choices, pools[0], pools[1])
    for crops in (9,) if quick else (9, 56):
        found += time_crops(crops)
    return found


def time_case(
    name: str, made: Pass, choices: dict[str, AttentionChoice], keys: Tensor, values: Tensor
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    tokens = len(made.blocks) * BLOCK + sum(part.count for part in made.text)
    copies = [torch.randn(tokens, 3 * DIM, dtype=DTYPE, device="cuda") for _ in range(3)]
    out = torch.empty(tokens, DIM, dtype=DTYPE, device="cuda")
    wanted = expected_prefill(made, copies[0], [keys, values])

    def run(attention: PrefillAttention, qkv: Tensor) -> None:
        q, k, v = qkv.view(tokens, 3 * HEADS, SIZE).chunk(3, dim=1)
        attention(0, q, k, v, out)

    def add(what: str, body: Callable[[Tensor], object], error: float | None) -> None:
        us = microseconds(lambda: [body(qkv) for qkv in copies], len(copies), replays=5)
        shown = "" if error is None else f"{error:.1e}"
        found.append({"case": name, "what": what, "us": round(us, 1), "error": shown})

    for what, choice in choices.items():
        if made.text and what == "torch flash":
            continue  # A mask leaves torch no choice: one line stands for both.
        out.fill_(torch.nan)
        try:
            attention = PrefillAttention(choice, made, keys, values, PAGE)
            run(attention, copies[0])
            error = relative_error(out, wanted)
            if not error < LIMIT:
                sys.exit(f"WRONG: {name} by {what}: {error:.2e}")
            add(what, partial(run, attention), error)
        except RuntimeError as refusal:  # A backend that can't do this here.
            print(f"refused: {name} by {what}: {str(refusal)[:200]}")
    if made.blocks:
        tables = Tables(1)
        positions = torch.arange(BLOCK, device="cuda").repeat(len(made.blocks))
        slots = torch.arange(tokens, device="cuda")

        def store(qkv: Tensor) -> None:
            rope_store(qkv, positions, slots, keys[0], values[0], tables.cos, tables.sin)

        add("rope_store", store, None)
    return found


def expected_prefill(made: Pass, qkv: Tensor, pools: list[Tensor]) -> Tensor:
    """Returns [T, H*D] float32, computed for one block or row at a time."""
    q, k, v = qkv.float().view(-1, 3 * HEADS, SIZE).chunk(3, dim=1)
    done = []
    for block in range(len(made.blocks)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        a, b, c = (x[own].transpose(0, 1)[None] for x in (q, k, v))
        with sdpa_kernel(SDPBackend.MATH):
            whole = F.scaled_dot_product_attention(a, b, c)
        done.append(whole[0].transpose(0, 1).flatten(1))
    for part in made.text:
        end = part.start + part.count
        at = torch.arange(end, device="cuda")
        slots = torch.tensor(part.page_table, device="cuda")[at // PAGE] * PAGE + at % PAGE
        seen = torch.ones(part.count, end, dtype=torch.bool, device="cuda").tril(part.start)
        mine = q[part.begin : part.begin + part.count].transpose(0, 1)[None]
        k_seen, v_seen = (pool[0, slots].float().transpose(0, 1)[None] for pool in pools)
        with sdpa_kernel(SDPBackend.MATH):
            row = F.scaled_dot_product_attention(mine, k_seen, v_seen, attn_mask=seen)
        done.append(row[0].transpose(0, 1).flatten(1))
    return torch.cat(done)


def time_crops(crops: int) -> list[dict[str, Any]]:
    """Times the attention of vision: 729 patches, 16 heads of 72."""
    qkv = torch.randn(crops, 729, 3, 16, 72, dtype=DTYPE, device="cuda")
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    found = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(backend: SDPBackend = backend) -> None:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v)

        us = microseconds(attend, 1, replays=5)
        name = backend.name.removesuffix("_ATTENTION").lower()
        case = f"{crops} crops of 729, 16 x 72"
        found.append({"case": case, "what": f"torch {name}", "us": round(us, 1), "error": ""})
    return found


def table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    if not rows:
        return
    widths = {c: max(len(c), *(len(str(row[c])) for row in rows)) for c in columns}
    print("  ".join(c.ljust(widths[c]) for c in columns))
    for row in rows:
        print("  ".join(str(row[c]).ljust(widths[c]) for c in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batches 1, 16 and 64, few candidates")
    parser.add_argument("--fp8", action="store_true", help="keys and values in FP8")
    parser.add_argument("--json", type=Path, help="write every figure to this path")
    parser.add_argument("--shown", type=int, default=6, help="number of lines for each batch size")
    arguments = parser.parse_args()
    began = time.perf_counter()
    kind = E4M3 if arguments.fp8 else DTYPE
    tried = candidates(SIZE, kind)
    if arguments.quick:
        tried = tried[::3]
    compile_all(tried, kind)
    print(f"compiled {len(tried)} candidates in {time.perf_counter() - began:.0f} s", flush=True)
    print(f"decode is right: relative error at most {check_decode(tried, kind):.1e}", flush=True)
    library = None
    try:
        library = None if arguments.fp8 else FlashInfer(torch.device("cuda", 0), DTYPE)
    except ConfigError as error:
        print(error)
    rate = copy_rate()
    sizes = (1, 16, 64) if arguments.quick else tuple(SPLITS)
    most = max(sizes)
    full, tables = make_batch(most, LAYERS, [LENGTH - 1] * most, kind), Tables(most)
    decode = []
    for rows in sizes:
        timed = time_decode(full.first(rows), tables, tried, rate, library)
        decode += timed
        named = [row for row in timed if row["what"].startswith(("default", "FlashInfer"))]
        best = [row for row in timed if row not in named][: arguments.shown]
        table(best + named, ["rows", "what", "us", "of copy"])
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
    del full
    prefill = [] if arguments.fp8 else time_prefill(library, arguments.quick)
    table(prefill, ["case", "what", "us", "error"])
    print(f"copy {rate / 1e12:.2f} TB/s; {time.perf_counter() - began:.0f} s in all")
    if arguments.json:
        arguments.json.write_text(json.dumps({"decode": decode, "prefill": prefill, "rate": rate}))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
