"""Teaches a model: measures it, lets it answer for the replay, fits an adapter, measures again, publishes the file."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..adapters.files import SUFFIXES
from ..adapters.references import checked_adapter_name, repository_of
from ..config.adapters import AdapterSources
from ..config.runtime import RuntimeConfig
from ..engine import InferenceEngine
from ..errors import ConfigError, InsufficientMemoryError, InvalidRequest, RuntimeFailure
from ..skills.base import SkillContext
from ..types.progress import Progress
from .data.examples import CaptionExample, Example, TaughtImage
from .data.lessons import Lesson, write
from .judging import RULES, Score, judge
from .learning.fitting import FitResult, FitStep, Fitting, ImageLessons
from .learning.packing import MOST_TEXT
from .replay import replay
from .settings import TeachingSettings

DESCRIPTION_WEIGHT = 4.0
"""Of a description in the replay, beside that of an answer: it says as much as several, and has as many words."""
REPORT_SUFFIX = ".report.json"


@dataclass(frozen=True, slots=True)
class TeachingReport:
    """``before``, ``after``: the scores by kind of example on ``judged`` images: the held-out ones, or the training
    images if none is held out. ``file``: the published adapter."""

    adapter: str
    file: Path
    model: str
    fingerprint: str
    images: int
    held_out: int
    replayed: int
    settings: TeachingSettings
    fitted: FitResult
    before: dict[str, Score]
    after: dict[str, Score]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        scores = {
            kind: {"before": asdict(self.before[kind]), "after": asdict(self.after[kind])}
            for kind in self.before
        }
        return {
            "adapter": self.adapter,
            "model": self.model,
            "weights": self.fingerprint,
            "images": self.images,
            "held_out_images": self.held_out,
            "judged_on": "held-out images" if self.held_out else "training images",
            "rules": RULES,
            "scores": scores,
            "replayed_examples": self.replayed,
            "training": asdict(self.fitted),
            "settings": asdict(self.settings),
        }


async def teach(
    config: RuntimeConfig,
    adapter: str,
    images: Sequence[TaughtImage],
    settings: TeachingSettings,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
    on_step: Callable[[FitStep], None] | None = None,
) -> TeachingReport:
    """Fits the adapter named ``adapter`` to ``images`` and writes it into ``config.adapters_dir`` by one rename.

    ``progress``: called while files are loaded and answers are made; ``on_step``: after each step, from another thread.
    Raises KestrelError; ConfigError if the name is invalid or taken, or nothing is left to train on.
    """
    folder = _free_place(config, adapter, overwrite)
    context = await asyncio.to_thread(_context, config)
    _check_fit(images, context)
    training, held_out = _split(images, settings)
    judged = held_out or training
    # Kernels may refuse what plain torch can compute: adapters of experts.
    plain = replace(
        config,
        compile=False,
        calibration="off",
        min_score=0.0,
        adapters_dir=None,
        adapter_sources=AdapterSources(),
    )
    async with await InferenceEngine.create(plain, progress=progress) as engine:
        before = await judge(engine, judged, None, progress)
        replayed = await replay(engine, images, settings.seed, progress) if settings.replay else []
    base = {image.path: image.examples for image in replayed}
    lessons, held_out_lessons = (
        _lessons(some, base, context, settings.replay) for some in (training, held_out)
    )
    # A name that starts with a dot is no adapter's, so no server reads from this folder.
    with tempfile.TemporaryDirectory(prefix=".teaching-", dir=folder) as made:
        file = Path(made) / f"{adapter}.safetensors"
        stopped = threading.Event()

        def step(done: FitStep) -> None:
            if stopped.is_set():
                raise RuntimeFailure("the training was stopped")
            if on_step is not None:
                on_step(done)

        try:
            fitted = await asyncio.to_thread(
                _fit, config, settings, lessons, held_out_lessons, file, step, progress
            )
        finally:
            # A task that is cancelled leaves its thread behind. It ends with the next step.
            stopped.set()
        tried = replace(plain, adapters_dir=Path(made))
        async with await InferenceEngine.create(tried, progress=progress) as engine:
            after = await judge(engine, judged, adapter, progress)
            info = engine.info
        report = TeachingReport(
            adapter,
            folder / file.name,
            info.model,
            info.weights_fingerprint,
            len(images),
            len(held_out),
            sum(len(image.examples) for image in replayed),
            settings,
            fitted,
            before,
            after,
        )
        described = Path(made) / f"{adapter}{REPORT_SUFFIX}"
        described.write_text(json.dumps(report.as_dict(), indent=1) + "\n", encoding="utf-8")
        for written in (described, file):
            _publish(written, folder)
    return report


def _lessons(
    images: Sequence[TaughtImage],
    base: Mapping[Path, Sequence[Example]],
    context: SkillContext,
    weight: float,
) -> list[ImageLessons]:
    """``base``: the base model's answers by image; ``weight``: theirs."""
    return [
        ImageLessons(
            image.path,
            tuple(_written(image.examples, context, 1.0)),
            tuple(_written(base.get(image.path, ()), context, weight)),
        )
        for image in images
    ]


def _free_place(config: RuntimeConfig, adapter: str, overwrite: bool) -> Path:
    """Returns the folder of adapters. Raises ConfigError."""
    try:
        checked_adapter_name(adapter)
    except InvalidRequest as error:
        raise ConfigError("adapter", adapter, error.message) from None
    if repository_of(adapter) is not None:
        raise ConfigError("adapter", adapter, "must be the name of a file, without a /")
    if config.adapters_dir is None:
        raise ConfigError(
            "adapters_dir", None, "must name the folder that the adapter is written to"
        )
    folder = Path(os.path.expanduser(config.adapters_dir))
    if not folder.is_dir():
        raise ConfigError("adapters_dir", str(folder), "is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("adapters_dir", str(folder), "is not writable")
    taken = [folder / adapter, *(folder / f"{adapter}{suffix}" for suffix in SUFFIXES)]
    for entry in taken:
        if entry.exists() and not (overwrite and entry.name == f"{adapter}.safetensors"):
            how = (
                "remove it first, because it is not the file that this command would replace"
                if overwrite
                else "choose another name, or set --overwrite"
            )
            raise ConfigError("adapter", adapter, f"{entry.name} is there; {how}")
    return folder


def _context(config: RuntimeConfig) -> SkillContext:
    """The model and the tokenizer, without weights. Raises KestrelError."""
    from ..checkpoint.open import open_model
    from ..preprocess.tokenizer import Tokenizer

    opened = open_model(config)
    codec = Tokenizer.from_file(opened.tokenizer_path, vocab_size=opened.config.text.vocab_size)
    return SkillContext(model=opened.config, codec=codec)


def _check_fit(images: Sequence[TaughtImage], context: SkillContext) -> None:
    """Raises ConfigError if an example is longer than a row, or longer than the model's context."""
    room = min(MOST_TEXT, context.model.text.max_context - context.model.image_prefix)
    for image in images:
        for example in image.examples:
            try:
                length = len(write(example, context))
            except InvalidRequest as error:
                raise ConfigError("data", image.path.name, str(error)) from None
            if length > room:
                raise ConfigError(
                    "data",
                    image.path.name,
                    f"an example about it has {length} tokens, the limit is {room}: {str(example)[:200]}",
                )


def _split(
    images: Sequence[TaughtImage], settings: TeachingSettings
) -> tuple[list[TaughtImage], list[TaughtImage]]:
    """Divides the images, not the examples, so that no held-out image was seen in training. Raises ConfigError."""
    order = list(images)
    random.Random(settings.seed).shuffle(order)
    count = round(settings.validation * len(order))
    if settings.validation and not count and len(order) > 1:
        count = 1
    if count >= len(order):
        raise ConfigError(
            "data", len(order), "images leave none to train on; add images, or set --validation 0"
        )
    return order[count:], order[:count]


def _written(examples: Sequence[Example], context: SkillContext, weight: float) -> list[Lesson]:
    return [
        write(
            example,
            context,
            DESCRIPTION_WEIGHT * weight if isinstance(example, CaptionExample) else weight,
        )
        for example in examples
    ]


def _fit(
    config: RuntimeConfig,
    settings: TeachingSettings,
    training: Sequence[ImageLessons],
    held_out: Sequence[ImageLessons],
    file: Path,
    on_step: Callable[[FitStep], None],
    progress: Progress | None,
) -> FitResult:
    """Loads the weights, fits, and writes the adapter to ``file``. Raises KestrelError."""
    import torch

    from ..building.device import device_of, dtype_of
    from ..checkpoint.open import load_weights, open_model
    from ..models.moondream import Moondream
    from .learning.image_embeddings import ImageEmbeddings
    from .learning.parameters import Parameters

    opened = open_model(config, progress=progress)
    device = device_of(config)
    try:
        loaded = load_weights(opened, dtype=dtype_of(config), device=device, progress=progress)
        model = Moondream(opened.config, loaded.tensors)
        parameters = Parameters(opened.config, settings, device)
        images = ImageEmbeddings(
            model,
            config.image_limits,
            settings.image_bytes,
            changed=parameters.changed,
        )
        fitted = Fitting(model, parameters, images, settings, on_step).run(training, held_out)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise InsufficientMemoryError(
            f"the device ran out of memory while training ({reason}); set --checkpointing, or lower --rows (now "
            f"{settings.rows})"
        ) from error
    described = {
        "model": opened.name,
        "weights": loaded.fingerprint,
        "made_by": "kestrel-grpc train",
    }
    parameters.write(file, described)
    return fitted


def _publish(file: Path, folder: Path) -> None:
    """Moves a file into ``folder`` by one rename, after its bytes are on the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
    os.replace(file, folder / file.name)
