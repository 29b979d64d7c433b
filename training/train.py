"""Train kestrel-tiny on one or more GPUs of a machine.

    python -m training.train --minutes 9 --out out/tiny
    torchrun --nproc-per-node 2 -m training.train --minutes 9 --out out/tiny

The schedule follows the clock, so a run has the same duration on every machine. --resume continues from a checkpoint
folder with a new warm-up. At the end, the export for the engine is written beside the checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from training.export import export, load_exported
from training.images.batch_images import ImageMaker
from training.learning import checkpoints
from training.learning.batches import Batch, StepData
from training.learning.losses import JITTER, HelperHead, loss_of, run
from training.learning.model import Moondream
from training.learning.muon import Muon
from training.learning.validation import Validation


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--minutes", type=float, default=9.0, help="length of the learning-rate schedule"
    )
    p.add_argument(
        "--max-steps", type=int, default=1_000_000, help="end earlier, after this many steps"
    )
    p.add_argument("--batch", type=int, default=192, help="images a step and GPU")
    p.add_argument("--lr", type=float, default=1.0, help="multiplies both learning rates")
    p.add_argument("--muon-lr", type=float, default=2e-3)
    p.add_argument("--adam-lr", type=float, default=1e-3)
    p.add_argument("--decay", type=float, default=0.05, help="weight decay")
    p.add_argument(
        "--annealed",
        type=float,
        default=0.0,
        help="progress 0..1 at which annealed parts of the loss start",
    )
    p.add_argument(
        "--warm", type=float, default=0.15, help="share of the run with mostly one-crop images"
    )
    p.add_argument("--seed", type=int, default=1, help="another seed, other scenes")
    p.add_argument(
        "--resume", type=Path, help="folder of checkpoint pieces, or of an export, to start from"
    )
    p.add_argument(
        "--out",
        type=Path,
        default=Path("out/tiny"),
        help="where checkpoint (each quarter) and export go",
    )
    p.add_argument(
        "--workers",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 2),
        help="processes that make scenes, for each GPU",
    )
    p.add_argument("--max-pixels", type=int, default=0, help="skip larger images (trials on a CPU)")
    p.add_argument(
        "--validate", type=int, default=4, help="validation batches, half way and at the end"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--eager", action="store_true", help="no torch.compile")
    p.add_argument(
        "--profile", action="store_true", help="time the stages of a few steps, then go on"
    )
    return p.parse_args()


@dataclass
class Clock:
    """Progress 0..1 by wall time, the same on every rank."""

    minutes: float
    world: int
    began: float = 0.0
    progress: float = 0.0

    def start(self) -> None:
        self.began = time.monotonic()

    def update(self, device: torch.device) -> float:
        now = (time.monotonic() - self.began) / 60 / self.minutes
        if self.world > 1:
            shared = torch.tensor([now], device=device)
            dist.broadcast(shared, 0)
            now = float(shared.item())
        self.progress = min(now, 1.0)
        return self.progress


class Stopwatch:
    """Milliseconds per stage over some steps; waits for the device, so only while ``active``."""

    def __init__(self) -> None:
        self.active = False
        self._mark, self._sums = 0.0, dict[str, float]()

    def lap(self, name: str | None) -> None:
        """Adds the time since the last lap to ``name``. None only starts a new lap."""
        if not self.active:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.monotonic()
        if name is not None:
            self._sums[name] = self._sums.get(name, 0.0) + now - self._mark
        self._mark = now

    def report(self, steps: int) -> None:
        stages = " ".join(
            f"{name} {1000 * value / steps:.1f}" for name, value in self._sums.items()
        )
        memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        print(f"  ms a step: {stages}; {memory:.1f} GB", flush=True)
        self.active, self._sums = False, {}


def learning_rate(progress: float, step: int) -> float:
    """Warm-up over 100 steps and cosine to 2 %."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
    return cosine * min(1.0, (step + 1) / 100)


def compile_blocks(model: Moondream) -> None:
    """Compile block by block: the crop count varies from step to step, the rest is fixed."""
    for block in model.vision.blocks:
        block.compile(dynamic=True)
    for block in model.text.blocks:
        block.compile()


def share_gradients(parameters: Sequence[Tensor], world: int) -> None:
    """Average the gradients over all ranks, as one flat buffer."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    flat /= world
    parts = torch.split(flat, [g.numel() for g in gradients])
    torch._foreach_copy_(
        gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)]
    )


def batches(args: argparse.Namespace, rank: int) -> Iterator[Batch]:
    """Returns practically endless training batches. The first ``--warm`` share of the estimated steps is cheap."""
    guess = int(args.minutes * 60 * 10)
    warm = 0 if args.resume else int(args.warm * guess)
    data = StepData(args.seed, args.batch, 1_000_000, warm, rank, args.max_pixels)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=args.workers,
        pin_memory=args.device == "cuda",
        prefetch_factor=4 if args.workers else None,
        persistent_workers=False,
    )
    return iter(loader)


def main() -> None:
    args = parse_arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs eagerly
    if world > 1:
        on_gpu = args.device == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    torch.manual_seed(args.seed)
    model, helper = Moondream().to(device), HelperHead(256).to(device)
    if args.resume and (args.resume / "model.safetensors").exists():
        load_exported(args.resume, model)
    elif args.resume:
        state = checkpoints.load(args.resume)
        model.load_state_dict(state["model"])
        helper.load_state_dict(state["helper"])
    if world > 1:
        for tensor in (*model.state_dict().values(), *helper.state_dict().values()):
            dist.broadcast(tensor, 0)
    torch.manual_seed(args.seed * 1000 + rank)
    if not args.eager:
        compile_blocks(model)
    muon = Muon(model, args.muon_lr, decay=args.decay)
    owned = {id(p) for p in muon.parameters}
    others = [p for p in (*model.parameters(), *helper.parameters()) if id(p) not in owned]
    adam = torch.optim.AdamW(
        others,
        args.adam_lr,
        betas=(0.9, 0.95),
        weight_decay=args.decay,
        fused=args.device == "cuda",
    )
    everything = [*muon.parameters, *others]
    maker = ImageMaker(compiled=not args.eager)
    validation = (
        Validation(maker, args.validate, args.max_pixels) if rank == 0 and args.validate else None
    )

    clock, data = Clock(args.minutes, world), batches(args, rank)
    clock.start()
    mark, seen, quarter, done = time.monotonic(), 0, 1, 0
    sums: dict[str, Tensor] = {}
    watch = Stopwatch()
    for step in range(args.max_steps):
        if step % 20 == 0 and clock.update(device) >= 1.0:
            break
        annealed = args.annealed + (1 - args.annealed) * clock.progress
        rate = learning_rate(clock.progress, step) * args.lr
        muon.lr = args.muon_lr * rate
        for group in adam.param_groups:
            group["lr"] = args.adam_lr * rate
        watch.active = args.profile and step % 200 >= 160
        watch.lap(None)
        batch = next(data).to(device)
        watch.lap("data")
        with torch.autocast(device.type, torch.bfloat16):
            pixels = maker_crops(maker, batch)
            watch.lap("images")
            loss, parts = loss_of(run(model, pixels, batch, JITTER), batch, helper, annealed)
        watch.lap("forward")
        loss.backward()
        watch.lap("backward")
        if world > 1:
            share_gradients(everything, world)
        norm = torch.nn.utils.clip_grad_norm_(everything, 1.0)
        muon.step()
        adam.step()
        for p in everything:
            p.grad = None
        watch.lap("optimiser")
        if watch.active and step % 200 == 199:
            watch.report(40)
        seen, done = seen + args.batch * world, step + 1
        for name, value in (("loss", loss), ("norm", norm), *parts.items()):
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.detach()
        if rank == 0 and (step + 1) % 100 == 0:
            now = time.monotonic()
            figures = " ".join(f"{name} {float(value) / 100:.3f}" for name, value in sums.items())
            print(
                f"step {step + 1} {now - clock.began:.0f} s {seen / (now - mark):.0f} images/s "
                f"lr {rate:.3f} {figures}",
                flush=True,
            )
            mark, seen, sums = now, 0, {}
        if clock.progress >= quarter / 4 and quarter < 4:
            quarter += 1
            if rank == 0:
                checkpoints.save(
                    args.out / "checkpoint",
                    {"model": model.state_dict(), "helper": helper.state_dict()},
                )
            if validation is not None and quarter == 3:
                validation.report(model, device)
            if world > 1:
                dist.barrier()
    if rank == 0:
        checkpoints.save(
            args.out / "checkpoint", {"model": model.state_dict(), "helper": helper.state_dict()}
        )
        export(model, args.out / "export")
        if validation is not None:
            validation.report(model, device)
        print(f"{done} steps, {time.monotonic() - clock.began:.0f} s", flush=True)
    if world > 1:
        dist.destroy_process_group()


def maker_crops(maker: ImageMaker, batch: Batch) -> Tensor:
    """Images are made in float32, outside autocast, and handed over as bfloat16."""
    with torch.autocast(batch.ids.device.type, enabled=False):
        return maker(batch).bfloat16()


if __name__ == "__main__":
    main()
