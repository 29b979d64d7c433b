"""Compares decoding and prefill on this CPU with other programs', in one run: the text decoder of Moondream 2's shape.

python -m benchmarks.peers --folder out/peers --formats Q8_0 --json F

The folder gets llama-cpp-python and gguf from the package index, compiled once (7 minutes on 2 idle cores), and a GGUF
file of made-up weights for each format. llama.cpp knows the shape as phi2. The two sides compute in turn, in two
processes with as many threads; the best round of each counts. Our precisions have about as many bits a weight. Both
sides need their memory at the same time: about 7 GB in bfloat16.

The format "torch" is Moondream's own torch code in bfloat16, not compiled. It is in no package index: give a clone's
folder with --moondream, or git clones it into FOLDER/moondream.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from kestrel_engine.types.model_config import TextConfig
from kestrel_engine.types.step import TokenRule

from .models.hand_made_steps import HandMadeSteps
from .models.opening import Opened, model_arguments, opened_model
from .reports.program import Flag, Program
from .reports.report import Report

PACKAGES = ("llama-cpp-python==0.3.36", "gguf==0.17.1")
MOONDREAM = ("https://github.com/vikhyat/moondream", "44146f139242dacdf7c02b799e68097424a31036")
PRECISIONS = {"BF16": "bfloat16", "Q8_0": "int8", "Q4_0": "int4", "torch": "bfloat16"}
PROGRAM = Program(
    "peers",
    __doc__,
    Flag("--folder", "out/peers", "where files are made and kept"),
    Flag(
        "--packages",
        None,
        "a folder with the peers; without it, they are installed into FOLDER/packages",
    ),
    Flag("--moondream", None, "a clone of Moondream's own code; without it, git fetches one"),
    Flag(
        "--formats",
        tuple(PRECISIONS),
        "llama.cpp's types of weights, or torch",
        choices=[*PRECISIONS],
    ),
    Flag("--positions", 741, "of a prompt: an image and a question", quick=32),
    Flag("--steps", 24, "steps of one row after the prompt", quick=2),
    Flag("--rounds", 3, "times that each side computes", quick=1),
    Flag("--threads", torch.get_num_threads(), "of each side"),
)
FIRST_TEXT_ID = 300
PEER = """
import json, sys, time, llama_cpp
path, positions, steps, threads = sys.argv[1], *map(int, sys.argv[2:])
room = positions + steps
model = llama_cpp.Llama(path, n_ctx=room + 8, n_threads=threads, n_threads_batch=threads, n_batch=room, n_ubatch=room,
                        verbose=False)
print("ready", flush=True)
for line in sys.stdin:
    model.reset()
    began = time.perf_counter()
    model.eval(json.loads(line))
    read = time.perf_counter()
    for token in range(steps):
        model.eval([500 + token])
    print(json.dumps([read - began, (time.perf_counter() - read) / steps]), flush=True)
"""
TORCH_PEER = """
import json, sys, time, torch
path, positions, steps, threads = sys.argv[1], *map(int, sys.argv[2:])
sys.path.insert(0, path)
from moondream.torch.config import TextConfig
from moondream.torch.moondream import KVCache
from moondream.torch.text import build_text_model, lm_head, text_decoder, text_encoder
torch.set_num_threads(threads)
config = TextConfig()
sizes = config.n_heads, config.n_kv_heads, config.max_context, config.dim
with torch.inference_mode():
    text = build_text_model(config, torch.bfloat16)
    text.wte.normal_(std=0.02)
    for block in text.blocks:
        block.kv_cache = KVCache(*sizes, "cpu", torch.bfloat16)
    mask = torch.ones(1, 1, config.max_context, config.max_context, dtype=torch.bool).tril()
    def run(ids, begin):
        end = begin + len(ids)
        x = text_encoder(torch.tensor([ids]), text)
        return lm_head(text_decoder(x, text, mask[:, :, begin:end], torch.arange(begin, end), config, None), text)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        run(json.loads(line), 0)
        read = time.perf_counter()
        for step in range(steps):
            run([500 + step], positions + step)
        print(json.dumps([read - began, (time.perf_counter() - read) / steps]), flush=True)
"""


@dataclass(frozen=True)
class Best:
    """Seconds of the best round: of a prompt, and of one further token."""

    prompt_s: float = inf
    token_s: float = inf

    def and_(self, prompt_s: float, token_s: float) -> Best:
        return Best(min(self.prompt_s, prompt_s), min(self.token_s, token_s))


def fetch(folder: Path, packages: Path | None) -> dict[str, str]:
    """Installs the peers into ``folder``, unless ``packages`` has them. Returns the environment of their processes."""
    packages = packages or folder / "packages"
    if not (packages / "llama_cpp").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--target", str(packages), *PACKAGES]
        subprocess.run(command, check=True)
    return os.environ | {"PYTHONPATH": str(packages)}


def write_gguf(path: str, kind: str) -> None:
    """Writes a model of Moondream 2's shape with made-up weights. Runs with the packages of `fetch`."""
    import gguf  # type: ignore[import-not-found]
    import numpy as np

    text = TextConfig()
    numbers = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "phi2")
    dim, hidden, vocab = text.dim, text.ff_dim, text.vocab_size
    writer.add_context_length(text.max_context)
    writer.add_embedding_length(dim)
    writer.add_feed_forward_length(hidden)
    writer.add_block_count(text.n_layers)
    writer.add_head_count(text.n_heads)
    writer.add_head_count_kv(text.n_heads)
    writer.add_layer_norm_eps(1e-5)
    writer.add_rope_dimension_count(32)
    writer.add_add_bos_token(False)
    # A byte-level vocabulary needs a token for each byte, in GPT-2's order.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, printable), *map(chr, range(256, 512 - len(printable)))]
    tokens = [*letters, *(f"token{i}" for i in range(len(letters), vocab))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("phi-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * vocab)
    writer.add_token_merges(["a b"])
    base = np.random.default_rng(0).standard_normal((hidden, dim), dtype=np.float32) * 0.02

    def matrix(name: str, rows: int, columns: int) -> None:
        values = gguf.quants.quantize(np.resize(base, (rows, columns)), numbers)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=numbers)

    def vector(name: str, size: int, value: float = 0.0) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    matrix("token_embd", vocab, dim)
    matrix("output", vocab, dim)
    vector("output.bias", vocab)
    vector("output_norm.weight", dim, 1)
    vector("output_norm.bias", dim)
    for layer in range(text.n_layers):
        block = f"blk.{layer}"
        vector(f"{block}.attn_norm.weight", dim, 1)
        vector(f"{block}.attn_norm.bias", dim)
        for name, rows, columns in (
            ("attn_qkv", 3 * dim, dim),
            ("attn_output", dim, dim),
            ("ffn_up", hidden, dim),
            ("ffn_down", dim, hidden),
        ):
            matrix(f"{block}.{name}", rows, columns)
            vector(f"{block}.{name}.bias", rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def clone(folder: Path, given: str | None) -> Path:
    """Returns the folder with Moondream's own code: ``given``, or a clone in ``folder``."""
    if given is not None:
        return Path(given).resolve()
    found, (address, commit) = folder / "moondream", MOONDREAM
    if not found.is_dir():
        if subprocess.run(["git", "clone", "-q", address, str(found)]).returncode:
            raise SystemExit(f"git can't clone {address}: give a clone of it by --moondream PATH")
    # Also an earlier run's clone, which may have ended before this.
    subprocess.run(["git", "-C", str(found), "checkout", "-q", commit], check=True)
    return found


def gguf_file(folder: Path, environ: dict[str, str], kind: str) -> Path:
    """Returns the file of made-up weights for llama.cpp, which is made once."""
    file = folder / f"{kind}.gguf"
    if not file.exists():
        made = file.with_suffix(".part")
        write = f"from benchmarks.peers import *; write_gguf({str(made)!r}, {kind!r})"
        subprocess.run([sys.executable, "-c", write], check=True, env=environ)
        made.replace(file)
    return file


@contextmanager
def peer(
    code: str, path: Path, environ: dict[str, str], *sizes: int
) -> Iterator[subprocess.Popen[str]]:
    """A process of ``code`` that answers each line of token ids with its seconds. ``path``: what it loads. ``sizes``:
    positions, steps and threads."""
    command = [sys.executable, "-c", code, str(path), *map(str, sizes)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ours(opened: Opened, ids: Sequence[int], num_steps: int) -> tuple[float, float]:
    """Seconds of a prompt of ``ids``, and of each of ``num_steps`` further tokens."""
    steps = HandMadeSteps(opened.runtime, rule=TokenRule())
    held = steps.hold(len(ids) + num_steps)
    began = time.perf_counter()
    steps.prefill([steps.row(held, tuple(ids), 0, draw=0)])
    read = time.perf_counter()
    for plan in steps.decode_plans([held], len(ids), num_steps):
        steps.run(plan)
    ended = time.perf_counter()
    steps.end([held])
    return read - began, (ended - read) / num_steps


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, _, report):
        folder = Path(args.folder).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        ids = [(i * 37) % 50_000 + FIRST_TEXT_ID for i in range(args.positions)]
        for kind in args.formats:
            flags = "--model moondream2 --random-weights --device cpu --max-batch-size 1"
            flags += f" --precision {PRECISIONS[kind]} --threads {args.threads}"
            config = model_arguments(flags.split())
            sizes = args.positions, args.steps, args.threads
            if kind == "torch":
                name, environ = "Moondream's torch code", dict(os.environ)
                code, path = TORCH_PEER, clone(folder, args.moondream)
            else:
                name = f"llama.cpp {kind}"
                environ = fetch(folder, Path(args.packages).resolve() if args.packages else None)
                code, path = PEER, gguf_file(folder, environ, kind)
            best, of_peer = Best(), Best()
            with opened_model(config) as opened:
                with peer(code, path, environ, *sizes) as process:
                    assert process.stdin is not None and process.stdout is not None
                    ours(opened, ids[:32], 2)
                    for _ in range(args.rounds):
                        best = best.and_(*ours(opened, ids, args.steps))
                        process.stdin.write(json.dumps(ids) + "\n")
                        process.stdin.flush()
                        of_peer = of_peer.and_(*json.loads(process.stdout.readline()))
            for side, found in ((PRECISIONS[kind], best), (name, of_peer)):
                report.add(
                    f"A prompt of {args.positions} positions, then one row; {args.threads} threads",
                    {
                        "side": side,
                        "prompt s": found.prompt_s,
                        "tokens/s": 1 / found.token_s,
                        "prompt, of the peer's": found.prompt_s / of_peer.prompt_s,
                        "rate, of the peer's": of_peer.token_s / found.token_s,
                    },
                )
    return report


if __name__ == "__main__":
    main()
