"""PacedRuntime: a device that needs a fixed time for a step and computes nothing, and the parts of an engine for it.

It samples words, and what a rule of a skill asks for: a forced or an allowed id, and a value in the middle.

It uses the GIL as a GPU runtime does: ``launch`` holds the GIL while it stages inputs, ``collect`` releases it until
the step ends, and steps follow one another without a gap if the next step is launched in time. The difference between
the measured rate and 1 / ``step_s`` is the time for which the device waited for the host.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import kestrel_engine
from kestrel_engine import EngineInfo, RuntimeConfig
from kestrel_engine.building.factory import Built
from kestrel_engine.preprocess.tokenizer import Tokenizer
from kestrel_engine.types.model_config import Family, SpecialIds, parse_model_config
from kestrel_engine.types.requests import Coord, Size
from kestrel_engine.types.step import RuntimeLimits, StepPlan, StepResult, StepToken, TokenRule

from .cpu_window import Window, WindowKeeper

TOKENIZER = Path(kestrel_engine.__file__).parent / "bundled" / "kestrel_tiny" / "tokenizer.json"
PAGE_SIZE = 10


class PacedRuntime:
    """``batch_size`` rows make a full step. The window begins with full step ``warm_up`` and ends with the latest.
    ``crop_s``: what a step takes longer for each crop of an image."""

    def __init__(
        self,
        limits: RuntimeLimits,
        ids: SpecialIds,
        *,
        step_s: float,
        staging_s: float,
        crop_s: float = 0.0,
        warm_up: int = 20,
    ) -> None:
        self._limits, self._ids = limits, ids
        self._step_s, self._staging_s, self._crop_s = step_s, staging_s, crop_s
        self._free_at = 0.0
        self._ends: dict[int, float] = {}
        words = [i for i, text in _plain_tokens() if text]
        self._tokens = itertools.cycle([StepToken(i) for i in words])
        self._returned_at = 0.0
        self._kept = WindowKeeper(warm_up)

    @property
    def limits(self) -> RuntimeLimits:
        return self._limits

    def launch(self, plan: StepPlan) -> StepPlan:
        now = time.perf_counter()
        while time.perf_counter() < now + self._staging_s:
            pass
        now = time.perf_counter()
        if len(plan.decode) == self._limits.max_batch_size:
            self._kept.host_s.append(now - self._returned_at)
        crops = sum(piece.last - piece.first for piece in plan.encode)
        self._free_at = max(now, self._free_at) + self._step_s + self._crop_s * crops
        self._ends[plan.step_id] = self._free_at
        return plan

    def is_done(self, handle: StepPlan) -> bool:
        return time.perf_counter() >= self._ends[handle.step_id]

    def collect(self, handle: StepPlan) -> StepResult:
        ends_at = self._ends.pop(handle.step_id)
        left = ends_at - time.perf_counter()
        time.sleep(max(0.0, left))
        self._returned_at = time.perf_counter()
        if len(handle.decode) == self._limits.max_batch_size:
            if left > 0:
                self._kept.late_s.append(self._returned_at - ends_at)
            self._kept.note()
        rows = handle.prefill + handle.decode
        return StepResult(
            tokens={
                r.sequence_id: self._sampled(r.sample.rule) for r in rows if r.sample is not None
            }
        )

    def _sampled(self, rule: TokenRule) -> StepToken:
        wanted = rule.otherwise if rule.forced is None else rule.forced
        if wanted is None and rule.allowed is not None:
            wanted = rule.allowed[0]
        if wanted is None:
            return next(self._tokens)
        if rule.read_coord and wanted == self._ids.coord_id:
            return StepToken(wanted, Coord(0.5))
        if rule.read_size and wanted == self._ids.size_id:
            return StepToken(wanted, Size(0.5, 0.5))
        return StepToken(wanted)

    def close(self) -> None:
        pass

    def window(self) -> Window:
        """Raises RuntimeError if the batch was never full for long enough."""
        return self._kept.window()


def paced_build(
    config: RuntimeConfig,
    *,
    step_s: float,
    staging_s: float,
    crop_s: float = 0.0,
    family: Family = "moondream2",
) -> Built:
    """Returns the parts of an engine that serves Moondream 2 or 3 on a paced device."""
    model = parse_model_config({"config": {}}, family=family)
    positions = min(model.text.max_context, config.max_seq_length or model.text.max_context)
    limits = RuntimeLimits(
        num_pages=(config.max_batch_size + 1) * (positions // PAGE_SIZE + 2),
        page_size=PAGE_SIZE,
        max_batch_size=config.max_batch_size,
        max_seq_length=positions,
        vocab_size=model.text.vocab_size,
    )
    info = EngineInfo(
        model="paced",
        family=model.family,
        skills=model.skills,
        max_context=positions,
        image_positions=model.image_positions,
        max_crops=model.vision.max_crops,
        vocab_size=limits.vocab_size,
        num_parameters=0,
        weights_bytes=0,
        weights_fingerprint="",
        device="paced",
        dtype="none",
        max_batch_size=limits.max_batch_size,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        max_queue=config.max_queue,
        torch_version="",
    )
    runtime = PacedRuntime(limits, model.ids, step_s=step_s, staging_s=staging_s, crop_s=crop_s)
    sizes = config.sizes(cuda=False)
    return Built(runtime, model, Tokenizer.from_file(TOKENIZER), info, sizes)


def _plain_tokens() -> list[tuple[int, str]]:
    """Returns ids with plain text, so that every token gives text at once. The first ids, which are special, are not
    among them."""
    vocabulary = json.loads(TOKENIZER.read_text())["model"]["vocab"]
    return [
        (i, text) for text, i in vocabulary.items() if i > 20 and text.removeprefix("Ġ").isascii()
    ]
