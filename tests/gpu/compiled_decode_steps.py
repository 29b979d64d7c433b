"""Compiles the layers of decode steps for an H100, at the shapes of a released model, and prints what kernels use.

    python -m tests.gpu.compiled_decode_steps FOLDER FAMILY ROWS...

Weights and KV cache are in FP8. It runs in a process of its own, because a process that has compiled like this should
compute nothing. One line of JSON: a list of [kernel, bytes of shared memory, registers a thread, bytes spilled, warps].
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from triton import knobs

from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint
from kestrel_engine.compiling.cards import card_of
from kestrel_engine.compiling.launches import compiled_launches
from kestrel_engine.compiling.stand_in_card import stand_in
from kestrel_engine.runtime.gpu.text.decoder import FusedText
from kestrel_engine.runtime.gpu.text.options import TextOptions
from kestrel_engine.runtime.gpu.weights import pack_weights
from kestrel_engine.types.model_config import Family, ModelConfig, parse_model_config

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def shortened(family: Family) -> ModelConfig:
    """Returns the released model with two layers of each kind."""
    config = parse_model_config({}, family=family)
    text = config.text
    moe = None if text.moe is None else replace(text.moe, start_layer=2)
    return replace(config, text=replace(text, n_layers=2 if moe is None else 4, moe=moe))


def compile_steps(family: Family, rows: list[int]) -> None:
    config, card = shortened(family), card_of("sm_90")
    text = config.text
    with stand_in(card), compiled_launches(card.compute_capability):
        device = torch.device("cuda:0")
        tensors = random_checkpoint(config, 0, torch.bfloat16, device, keep_fp8=True).tensors
        packed = pack_weights(config, tensors)
        fused = FusedText(
            text,
            packed,
            TextOptions(max_rows=max(rows), page_size=10, pdl=True, fp8=True, fp8_decode=True),
        )
        shape = text.n_layers, 1000, text.n_heads, text.head_dim
        keys, values = (
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=device) for _ in range(2)
        )
        for count in rows:
            x = torch.empty(count, text.dim, dtype=torch.bfloat16, device=device)
            ints = torch.empty(count, dtype=torch.int32, device=device)
            table = torch.empty(count, 100, dtype=torch.int32, device=device)
            fused.decode(x, ints, ints, table, keys, values)


def resources(folder: Path) -> Iterator[tuple[str, int, int, int, int]]:
    for path in sorted(folder.rglob("*.cubin")):
        metadata = json.loads(path.with_suffix(".json").read_text())
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = _RESOURCES.search(done.stdout + done.stderr)
        assert found is not None, done.stdout
        registers, stack, local = map(int, found.groups())
        yield path.stem, metadata["shared"], registers, stack + local, metadata["num_warps"]


def main() -> None:
    folder, family, *rows = sys.argv[1:]
    knobs.cache.dir = folder
    compile_steps(cast(Family, family), list(map(int, rows)))
    print(json.dumps(list(resources(Path(folder)))))


if __name__ == "__main__":
    main()
