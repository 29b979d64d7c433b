"""Measures the time from the start of the server's process until it is ready, with weights on a local disk.

python -m benchmarks.gpu.startup --model moondream2 --device cuda --folder /tmp/weights --json F

It writes a checkpoint of the model's true size, with random weights, to --folder, and keeps it for later runs. Experts
are in FP8 for moondream3.1-9b-a2b, as released, and for moondream3-preview with --fp8. Then it starts ``kestrel-grpc
serve`` several times. Without --warm, it asks the kernel before each run to drop the files' pages, so they are read
from the disk. The first run compiles kernels; the last run counts. The server's log shows the time of each stage.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kestrel_engine import RuntimeConfig
from kestrel_engine.checkpoint.open import open_model

from ..models import TINY
from ..reports import bars
from ..reports.program import Flag, Program
from ..reports.report import Report
from ..traffic.processes import START_PATIENCE_S, serve

PROGRAM = Program(
    "gpu.startup",
    __doc__,
    Flag("--model", "moondream2", "model", quick=TINY),
    Flag("--device", "cuda", "device", quick="cpu"),
    Flag("--folder", Path("/tmp/kestrel-weights"), "folder of the weights", type=Path),
    Flag("--fp8", False, "write the experts in FP8"),
    Flag("--runs", 3, "number of starts, of which the last is reported", quick=1),
    Flag("--warm", False, "leave the files in the page cache"),
    others="All other flags go to the server.",
)


@dataclass(frozen=True)
class Start:
    """A start of the server. ``ready_s``: seconds from the process's start until ready. ``log``: the server's log."""

    ready_s: float
    log: str


def write_checkpoint(model: str, folder: Path, *, device: str, keep_fp8: bool) -> int:
    """Writes weights, config.json and a tokenizer, unless they exist. Returns the bytes of the weights."""
    weights = folder / "model.safetensors"
    if not weights.is_file():
        import torch
        from safetensors.torch import save_file

        from kestrel_engine.checkpoint.weights.random_weights import random_checkpoint

        config = open_model(RuntimeConfig(model=model, random_weights=True)).config
        tensors = random_checkpoint(
            config, 0, torch.bfloat16, device, keep_fp8=keep_fp8, progress=lambda *_: None
        ).tensors
        folder.mkdir(parents=True, exist_ok=True)
        save_file({_stored_name(n): t.cpu() for n, t in tensors.items()}, weights)
        del tensors
        if device != "cpu":
            # The server plans with what is free.
            torch.cuda.empty_cache()
        if (described := Path(model) / "config.json").is_file():
            shutil.copy(described, folder)
        else:
            (folder / "config.json").write_text(json.dumps({"model_type": config.family}))
        shutil.copy(Path(TINY) / "tokenizer.json", folder)
    return weights.stat().st_size


def _stored_name(name: str) -> str:
    """Returns the stored name of a tensor. Row scales have the released names."""
    for leaf, side in (("fc1", "up"), ("fc2", "down")):
        if name.endswith(f".mlp.{leaf}.scale"):
            return name.replace(f"mlp.{leaf}.scale", f"mlp.moe_quant.{side}_scale")
    return name


def forget_pages(folder: Path) -> None:
    """Asks the kernel to drop the files' pages from its cache."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start_server(flags: Sequence[str]) -> Start:
    """Starts a server, waits until it is ready, and ends it. Raises RuntimeError, with its log, if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with serve(flags, log=log, end_patience_s=START_PATIENCE_S) as server:
            ready_s = server.ready_s
        return Start(ready_s, log.read_text(errors="replace"))


def measure(
    report: Report, model: str, folder: Path, size: int, flags: Sequence[str], runs: int, warm: bool
) -> None:
    for number in range(runs):
        if not warm:
            forget_pages(folder)
        start = start_server(flags)
        report.add(
            "From the start of the process until ready",
            {"model": model, "run": number + 1, "GB": size / 1e9, "s": start.ready_s},
        )
        for line in start.log.splitlines():
            if "kestrel_engine.building" in line or "load_s" in line:
                print(f"    {line}")
    limits = bars.READY_S.get(model, bars.NONE) if "cuda" in flags else bars.NONE
    report.figure(f"{model}: start to ready", start.ready_s, "s", limits, at_least=False)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, of_server, report):
        model, device = args.model, args.device
        keep_fp8 = args.fp8 or model == "moondream3.1-9b-a2b"
        name = Path(model).name
        folder = args.folder / (name + ("-fp8" if keep_fp8 else ""))
        size = write_checkpoint(model, folder, device=device, keep_fp8=keep_fp8)
        flags = ["--model", model, "--weights", str(folder), "--device", device, *of_server]
        measure(report, name, folder, size, flags, args.runs, args.warm)
    return report


if __name__ == "__main__":
    main()
