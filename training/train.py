"""Train kestrel-small in slices, on one or more GPUs of a machine.

    KESTREL_SOURCES=... torchrun --nproc-per-node 2 -m training.train --minutes 9 --from-minute 0 --out $OUT
    python -m training.train --resume training/resume --from-minute 18 --minutes 9 --out $OUT

The learning rate follows the minutes of the whole plan: warm-up, constant, and a decay over its last third. Weights for
checkpoint and figures (judging.py) are a moving average. --out gets the checkpoint in pieces.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from training.crops import crops, spoil
from training.kestrel_small import CONFIG
from training.learning import checkpoints
from training.learning.batches import Batch, Steps
from training.learning.graphs import Graphs
from training.learning.losses import JITTER, PageHelper, loss_of, run
from training.learning.model import Learner, initial_tensors
from training.learning.muon import Muon
from training.mixture import DOMAINS

AVERAGE = 0.998  # of the weights, a step
MUON_RATE, ADAM_RATE = 2e-3, 1e-3
DECAY = 0.05  # of the weights
SAVE_EVERY = 3.0  # minutes
LOG_EVERY = 15.0  # seconds


def parse_arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, default: float, help: str) -> None:
        p.add_argument(name, type=type(default), default=default, help=f"{help} [{default}]")

    number("--minutes", 9.0, "training time of this slice, without start and figures")
    number("--from-minute", 0.0, "minutes of the plan that earlier slices had")
    number("--plan", 110.0, "minutes of the whole plan")
    number("--until", 0.0, "stop training so many seconds after the start of the process; 0: don't")
    number("--batch", 64, "one-crop pictures a step and GPU")
    number("--lr", 1.0, "multiplies both learning rates")
    number("--seed", 1, "of the pictures")
    number("--workers", 0, "processes that draw, for each GPU; 0: one a core, less two")
    number("--max-steps", 1_000_000, "stop after so many steps")
    p.add_argument("--resume", type=Path, help="folder of checkpoint pieces")
    p.add_argument("--out", type=Path, default=Path("out/small"))
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--eager", action="store_true", help="compile nothing")
    return p.parse_args()


def learning_rate(progress: float, step: int) -> float:
    """Warm-up over 200 steps, constant, linear to 2 % over the last third of the plan."""
    return min(1.0, (step + 1) / 200, max(0.02, 0.02 + 0.98 * (1 - progress) / 0.33))


def gradients_of(parameters: Sequence[Tensor]) -> Tensor:
    """One flat buffer that holds the gradients of all parameters."""
    flat = parameters[0].new_zeros(sum(p.numel() for p in parameters))
    sizes = [p.numel() for p in parameters]
    for p, gradient in zip(parameters, torch.split(flat, sizes), strict=True):
        p.grad = gradient.view_as(p)
    return flat


class Trainer:
    """Model, helper and optimisers of one rank. Rank 0 also has ``average``, which follows the weights."""

    def __init__(
        self, args: argparse.Namespace, world: int, rank: int, device: torch.device
    ) -> None:
        self.args, self.world, self.device, self.steps = args, world, device, 0
        torch.manual_seed(args.seed)
        tensors, self.helper = initial_tensors(CONFIG), PageHelper(CONFIG.text.dim)
        if args.resume:
            state = checkpoints.load_quantised(args.resume)
            tensors = state["model"]
            self.helper.take(state["helper"])
        self.helper.to(device)
        self.model = Learner(CONFIG, {name: t.to(device) for name, t in tensors.items()})
        if world > 1:
            for tensor in (*self.model.tensors.values(), *self.helper.state_dict().values()):
                dist.broadcast(tensor.detach(), 0)
        followed = self.model.tensors if rank == 0 else {}
        self.average = {name: t.detach().clone() for name, t in followed.items()}
        if not args.eager:
            self.model.compile()
        torch.manual_seed(args.seed * 1000 + rank)
        self.muon = Muon(self.model.parameters, MUON_RATE, decay=DECAY)
        rest = [p for name, p in self.model.parameters.items() if name not in self.muon.names]
        self.adam = torch.optim.AdamW(
            [*rest, *self.helper.parameters()], ADAM_RATE, (0.9, 0.95), weight_decay=DECAY,
            fused=device.type == "cuda",
        )  # fmt: skip
        self.gradients = gradients_of([*self.model.parameters.values(), *self.helper.parameters()])
        self._graphs = Graphs(self._differentiate)

    def step(self, batch: Batch, progress: float, rate: float) -> dict[str, Tensor]:
        self.muon.lr = MUON_RATE * rate
        self.adam.param_groups[0]["lr"] = ADAM_RATE * rate
        shown = crops(spoil(batch.pixels), batch.tiling, CONFIG.vision)
        parts = self._graphs(batch, shown, torch.full((), progress, device=self.device))
        if self.world > 1:
            dist.all_reduce(self.gradients)
        norm = self.gradients.norm() / self.world
        self.gradients.mul_((1 / (norm + 1e-6)).clamp_max(1) / self.world)
        self.muon.step()
        self.adam.step()
        self.steps += 1
        if self.average:
            keep = min(AVERAGE, 1 - 1 / (1 + 0.3 * self.steps))
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self.average.values()), list(self.model.tensors.values()), 1 - keep
                )
        return {**parts, "norm": norm}

    def _differentiate(self, batch: Batch, shown: Tensor, progress: Tensor) -> dict[str, Tensor]:
        """The losses, and their gradients in ``gradients``."""
        self.gradients.zero_()
        on_gpu = self.device.type == "cuda"  # bfloat16 is slow on a CPU
        with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
            loss, parts = loss_of(
                run(self.model, batch, shown, JITTER), batch, self.helper, progress
            )
        torch.autograd.backward(loss)
        return {"loss": loss.detach(), **{name: part.detach() for name, part in parts.items()}}

    def save(self) -> None:
        state = {"model": self.average, "helper": self.helper.state_dict()}
        checkpoints.save(self.args.out / "checkpoint", checkpoints.halved(state))


def batches(args: argparse.Namespace, rank: int, world: int) -> Iterator[Batch]:
    seed = args.seed * 1000 + round(args.from_minute)
    data = Steps(seed, args.batch, rank)
    workers = args.workers or max(1, (os.cpu_count() or 2) // world - 2)
    pinned = args.device == "cuda"
    return iter(DataLoader(data, None, num_workers=workers, pin_memory=pinned, prefetch_factor=2))


class Log:
    """Speed and mean losses since the last line, which is LOG_EVERY seconds old or more."""

    def __init__(self, born: float, device: torch.device) -> None:
        self._born, self._device = born, device
        self._clear()

    def _clear(self) -> None:
        self._mark, self._waited, self._seen, self._steps = time.monotonic(), 0.0, 0, 0
        self._sums: dict[str, Tensor] = {}
        self._domains = torch.zeros(len(DOMAINS), 2, device=self._device)

    def add(self, batch: Batch, parts: dict[str, Tensor], seen: int, waited: float) -> None:
        self._waited += waited
        self._seen, self._steps = self._seen + seen, self._steps + 1
        rows = parts.pop("rows")
        self._domains.index_add_(0, batch.domain, torch.stack((rows, torch.ones_like(rows)), 1))
        for name, value in parts.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def show(self, step: int, rate: float) -> None:
        now = time.monotonic()
        took = now - self._mark
        if step > 1 and took < LOG_EVERY:
            return
        each = " ".join(f"{name} {float(v) / self._steps:.3f}" for name, v in self._sums.items())
        domains = zip(DOMAINS, self._domains.tolist(), strict=True)
        texts = " ".join(f"{name} {a / max(n, 1):.3f}" for name, (a, n) in domains)
        print(f"step {step} {now - self._born:.0f} s {self._seen / took:.0f} pictures/s "
              f"waited {self._waited / took:.0%} rate {rate:.3f} | {each} | text: {texts}", flush=True)  # fmt: skip
        self._clear()


def main() -> None:
    born = time.monotonic()
    args = parse_arguments()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device(args.device)
    if args.device == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]  # for graphs
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs eagerly
    if world > 1:
        on_gpu = args.device == "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    data = batches(args, rank, world)
    trainer = Trainer(args, world, rank, device)
    began, log = time.monotonic(), Log(born, device)
    saved, done, spent = 0.0, 0, 0.0  # spent: minutes
    for step in range(args.max_steps):
        if step % 10 == 0:
            now = time.monotonic()
            late = args.until and now - born > args.until
            clock = torch.tensor([(now - began) / 60, float(bool(late))], device=device)
            if world > 1:
                dist.broadcast(clock, 0)
            spent, late = clock.tolist()
            if late or spent >= args.minutes:
                break
        progress = (args.from_minute + spent) / args.plan
        asked = time.monotonic()
        batch = next(data).to(device)
        waited = time.monotonic() - asked
        rate = args.lr * learning_rate(progress, step)
        log.add(batch, trainer.step(batch, progress, rate), len(batch.ids) * world, waited)
        done = step + 1
        if rank == 0 and (done % 10 == 0 or done == 1):
            log.show(done, rate)
            if spent > saved + SAVE_EVERY:
                saved = spent
                trainer.save()
    if rank == 0:
        trainer.save()
        took = f"{spent:.2f} minutes of the plan, {time.monotonic() - born:.0f} s"
        print(f"{done} steps, {took}", flush=True)
    if world > 1:
        dist.barrier()
    os._exit(0)  # at once: joining the drawing processes takes a minute


if __name__ == "__main__":
    main()
