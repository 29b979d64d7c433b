"""Loads the model that a benchmark's flags name: the flags of ``kestrel-grpc serve`` about the model and its steps.

Several engines and benchmarks can use one loaded model, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

from kestrel_engine import InferenceEngine, Observer, RuntimeConfig, SkillRegistry
from kestrel_engine.building.factory import Built, build
from kestrel_engine.checkpoint.open import open_model as open_files
from kestrel_engine.runtime.protocol import Runtime, StepHandle
from kestrel_engine.types.step import Row, RuntimeLimits, StepPlan, StepResult
from kestrel_grpc.process.interpreter import GC_THRESHOLDS, SWITCH_INTERVAL_S
from kestrel_grpc.settings.flags import Parser
from kestrel_grpc.settings.model import add_model_flags, runtime_configs

from ..reports.program import Program
from ..reports.report import Report
from ..traffic.callers import EngineTarget
from . import TINY
from .forced_skill import ForcedCaption, ForcedDetect, ForcedQuery
from .made_up_tokenizer import tokenizer_file

if TYPE_CHECKING:
    import torch

    from kestrel_engine.models.moondream import Moondream

MODEL_FLAGS = (
    "All other flags are those of 'kestrel-grpc serve' about the model and its steps: --model, --random-weights,\n"
    "--device, --precision, --max-batch-size, --step-crops and so on."
)
QUICK = ("--model", TINY, "--device", "cpu", "--max-seq-length", "640")
"""Flags of the model with --quick. The user's flags follow them."""

KV_CACHE_GIB = 24.0
"""The default size of the KV cache on CUDA: 64 sequences of 2,048 positions. The server's default takes nearly all free
memory, and would leave none for a float32 reference or a second process."""


class ModelRuntime(Runtime, Protocol):
    """A runtime with a model, and with a forward pass that returns hidden states."""

    @property
    def model(self) -> Moondream: ...

    def hidden(self, rows: Sequence[Row]) -> torch.Tensor:
        """Returns [num_rows, dim], the residual stream at each row's last position, before the last LayerNorm."""
        ...


@dataclass(frozen=True)
class Opened:
    """A loaded model. ``seconds``: the time of loading. ``config``: the configuration of loading."""

    config: RuntimeConfig
    built: Built
    seconds: float

    @property
    def name(self) -> str:
        """The name of the architecture, for read and for random weights."""
        return self.built.info.model.partition(" (")[0]

    @property
    def runtime(self) -> ModelRuntime:
        return cast(ModelRuntime, self.built.runtime)

    @property
    def on_cuda(self) -> bool:
        return self.built.info.device.startswith("cuda")

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device(self.built.info.device)

    @property
    def kv_dtype(self) -> torch.dtype:
        """Whether the KV cache is in FP8."""
        import torch

        found = getattr(torch, self.built.info.kv_cache_dtype)
        assert isinstance(found, torch.dtype), found
        return found

    @property
    def kv_in_fp8(self) -> bool:
        return self.kv_dtype.itemsize == 1


Measure = Callable[[argparse.Namespace, Opened, Report], Coroutine[None, None, None] | None]
"""Measures a loaded model as the flags say, and reports it."""


def model_arguments(arguments: Sequence[str], *, quick: bool = False) -> RuntimeConfig:
    """Returns the configuration for flags of ``kestrel-grpc serve``."""
    parser = Parser(prog="model", allow_abbrev=False)
    add_model_flags(parser)
    given = [*(QUICK if quick else ()), *arguments]
    (config,) = runtime_configs(parser.parse_args(given))
    if config.kv_cache_gib is None and config.kv_cache_pages is None and _is_cuda(config.device):
        config = replace(config, kv_cache_gib=KV_CACHE_GIB)
    if config.random_weights and config.tokenizer_path is None:
        # The bundled tokenizer has few ids of a released vocabulary, so streams would contain no text.
        vocab_size = open_files(config).config.text.vocab_size
        config = replace(config, tokenizer_path=tokenizer_file(vocab_size))
    return config


def server_flags(arguments: Sequence[str], config: RuntimeConfig) -> list[str]:
    """Returns ``arguments`` with the defaults that `model_arguments` chose, for ``kestrel-grpc serve``."""
    flags = list(arguments)
    chosen = {"--kv-cache-gib": config.kv_cache_gib, "--tokenizer": config.tokenizer_path}
    for flag, value in chosen.items():
        if value is not None and not any(f.partition("=")[0] == flag for f in flags):
            flags += [flag, str(value)]
    return flags


def _is_cuda(device: str) -> bool:
    import torch

    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def open_model(config: RuntimeConfig) -> Opened:
    """Loads the model of ``config`` and prints the time that it took."""
    print(f"loading {config.model} on {config.device}", flush=True)
    began = time.perf_counter()
    built = build(config)
    seconds = time.perf_counter() - began
    info = built.info
    print(
        f"loaded {info.model} on {info.device} {info.device_name} ({info.dtype}, "
        f"{info.num_parameters / 1e9:.2f} G parameters, {info.num_pages} pages of {info.page_size}) in {seconds:.1f} s",
        flush=True,
    )
    return Opened(config, built, seconds)


@contextmanager
def opened_model(config: RuntimeConfig) -> Iterator[Opened]:
    """As `open_model`, and closes the model at the end of the context."""
    opened = open_model(config)
    try:
        yield opened
    finally:
        opened.runtime.close()


def run_on_model(program: Program, measure: Measure, arguments: Sequence[str] | None) -> Report:
    """Loads the model of the flags, measures it, and returns the report."""
    with program.reporting(arguments) as (args, of_model, report):
        with opened_model(model_arguments(of_model, quick=args.quick)) as opened:
            run_measure(measure, args, opened, report)
    return report


def run_measure(measure: Measure, args: argparse.Namespace, opened: Opened, report: Report) -> None:
    measured = measure(args, opened, report)
    if measured is not None:
        asyncio.run(measured)


@contextmanager
def server_gc() -> Iterator[None]:
    """Sets the garbage collector and the switch interval as the server does after startup."""
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GC_THRESHOLDS)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)


class KeptRuntime:
    """A runtime that outlives its engine. ``close`` ends the engine's sequences and keeps the runtime open."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._out: deque[StepHandle] = deque()
        self._sequences: set[int] = set()
        self._images: set[str] = set()
        self._crops: set[str] = set()

    @property
    def limits(self) -> RuntimeLimits:
        return self._runtime.limits

    def launch(self, plan: StepPlan) -> StepHandle:
        handle = self._runtime.launch(plan)
        self._out.append(handle)
        # Every sequence begins with a prefill row, so decode rows, of which there are many, need no look.
        self._sequences.update(row.sequence_id for row in plan.prefill)
        self._sequences.difference_update(plan.ended)
        self._images.update(piece.image.key for piece in plan.encode)
        self._images.difference_update(plan.drop_images)
        self._crops.difference_update(plan.drop_crops)
        self._crops.update(key for piece in plan.encode for key in piece.kept_keys)
        return handle

    def is_done(self, handle: StepHandle) -> bool:
        return self._runtime.is_done(handle)

    def collect(self, handle: StepHandle) -> StepResult:
        self._out.remove(handle)
        return self._runtime.collect(handle)

    def close(self) -> None:
        while self._out:
            self._runtime.collect(self._out.popleft())
        left = StepPlan(
            0,
            drop_images=tuple(self._images),
            drop_crops=tuple(self._crops),
            ended=tuple(self._sequences),
        )
        self._runtime.collect(self._runtime.launch(left))
        self._sequences, self._images, self._crops = set(), set(), set()


@dataclass(frozen=True)
class RunningEngine:
    engine: InferenceEngine
    target: EngineTarget


@asynccontextmanager
async def engine_on(
    opened: Opened, observer: Observer | None = None
) -> AsyncIterator[RunningEngine]:
    """Runs an engine on a loaded model, with the skills of forced length. The model stays loaded afterwards."""
    forced = ForcedCaption(), ForcedDetect(), ForcedQuery()
    skills = SkillRegistry([*SkillRegistry.default(), *forced])
    built = replace(opened.built, runtime=KeptRuntime(opened.built.runtime))
    async with InferenceEngine(opened.config, built, skills, observer=observer) as engine:
        yield RunningEngine(engine, EngineTarget(engine))
