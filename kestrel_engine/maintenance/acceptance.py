"""Whether a model on this machine is what it should be: its tokenizer, its known answers, its speed and memory."""

from __future__ import annotations

import resource
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint.checksums import checksum
from ..config.model_settings import DEFAULT_MODEL
from ..config.runtime import RuntimeConfig
from ..engine import InferenceEngine
from .finding import Finding
from .model import check_fit, opened_of
from .releases import RELEASES, TOLERANCE, KnownAnswer, Picture, TokenizerFacts, release_of

if TYPE_CHECKING:
    from ..preprocess.tokenizer import Tokenizer
    from ..types.events import EngineResult
    from ..types.progress import Progress

_SHOWN = 3
_TOKENS = 24
"""Tokens of the answer whose speed is measured."""
_SLOWER = 1.5
"""How much slower than the documented figures is worth a warning."""
_NAME_IT = "if it is one of these models, name it: --model"


def check_tokenizer(tokenizer: Tokenizer, facts: TokenizerFacts) -> Finding:
    """Compares a tokenizer with what is known of the released one. Most known ids are what the model wrote: their
    text is certain, but the text may have other ids, which only warns."""
    wrong: list[str] = []
    others: list[str] = []
    if tokenizer.vocab_size != facts.vocabulary:
        wrong.append(f"{tokenizer.vocab_size} ids instead of {facts.vocabulary}")
    for text, ids in facts.ids.items():
        if (found := tokenizer.encode(text)) != ids:
            differ = others if tokenizer.decode(ids) == text else wrong
            differ.append(f"{text!r} has the ids {found[:8]} instead of {ids}")
    for text, length in facts.lengths.items():
        if (count := len(tokenizer.encode(text))) != length:
            wrong.append(f"{text!r} has {count} ids instead of {length}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        message = f"not the released one: {'; '.join(wrong[:_SHOWN])}{more}"
        return Finding(
            "tokenizer", "fail", message, f"--tokenizer: the tokenizer.json of {facts.source}"
        )
    if others:
        message = f"all ids have their texts; {len(others)} texts have other ids: {'; '.join(others[:_SHOWN])}"
        return Finding("tokenizer", "warn", message, "report the difference")
    known = len(facts.ids) + len(facts.lengths)
    return Finding("tokenizer", "ok", f"{facts.vocabulary} ids; {known} known texts have theirs")


async def accept(
    config: RuntimeConfig, images: Sequence[str] = (), *, progress: Progress | None = None
) -> AsyncIterator[Finding]:
    """Loads the model. Yields a finding for each known answer, then for its speed and its memory. With a precision of 8
    bits, loads the model without it too, and compares the answers. ``images``: paths of pictures that are not bundled.
    For weights that are given by path, only ``config.model`` says which model they are. Raises KestrelError.
    """
    name, release = release_of(config.model)
    if release is None or (name == DEFAULT_MODEL and config.model_path is not None):
        model = config.model_path or config.model
        models = ", ".join(name for name, each in RELEASES.items() if each.answers)
        message = f"not checked: no answer is known for {model}, only for {models}"
        yield Finding("answers", "warn", message, _NAME_IT)
        return
    if not release.answers:
        yield Finding("answers", "warn", f"not checked: no answer is known for {name}")
    pictures = {checksum(Path(path)): path for path in images}
    named = {known.picture.sha256 for known in release.answers if known.picture is not None}
    unnamed = [path for digest, path in pictures.items() if digest not in named]
    at_hand = []
    for known in release.answers:
        source = _source(known.picture, pictures, unnamed)
        if known.picture is None or source is not None:
            at_hand.append((known, source))
            continue
        message = f"{known.request}: not checked: it is about {known.picture.described}"
        yield Finding("answer", "warn", message, "give the picture with --image")
    used = [source for _, source in at_hand]
    for path in images:
        if path not in used:
            message = f"{path}: is not a picture of a known answer"
            yield Finding("answer", "warn", message, "give the picture's file as it was published")
    if release.answers and not at_hand:
        return
    outputs = []
    precision = config.precision
    # The engine takes what is free of a card, so the estimate comes before it.
    opened = opened_of(config)
    estimate = "" if opened is None else next(iter(check_fit(config, opened))).message
    async with await InferenceEngine.create(config, progress=progress) as engine:
        info = engine.info
        where = f"on {info.device}, {info.dtype if precision == 'auto' else precision}"
        for known, source in at_hand:
            result = await _ask(engine, known, source)
            outputs.append(result.output)
            yield _compared(known, result, where)
        yield await _speed(engine, precision, release.speed)
        yield _memory(estimate, info.device)
    if not at_hand or not precision.startswith("fp8"):
        return
    plain = replace(
        config, precision=info.dtype, dtype="auto", fp8_gemms="auto", kv_cache_dtype="auto"
    )
    async with await InferenceEngine.create(plain, progress=progress) as engine:
        others = [(await _ask(engine, known, source)).output for known, source in at_hand]
    differ = [
        f"{known.request}: {_short(output)}, and {_short(other)} in {info.dtype}"
        for (known, _), output, other in zip(at_hand, outputs, others, strict=True)
        if distance_of(other, output) > TOLERANCE
    ]
    message = f"{len(at_hand) - len(differ)} of {len(at_hand)} answers are those of {info.dtype}"
    yield Finding("precision", "warn" if differ else "ok", "; ".join((message, *differ)))


def _source(
    picture: Picture | None, paths: Mapping[str, str], unnamed: Sequence[str]
) -> str | np.ndarray | None:
    """The picture, as the engine takes it; None if there is no picture or the user must give it."""
    if picture is None:
        return None
    if picture.draw is not None:
        return picture.draw()
    if picture.path is not None:
        return str(picture.path)
    if picture.sha256 is not None:
        return paths.get(picture.sha256)
    return unnamed[0] if unnamed else None


async def _ask(
    engine: InferenceEngine, known: KnownAnswer, source: str | np.ndarray | None
) -> EngineResult:
    settings = {"temperature": 0.0} if known.skill in ("query", "caption") else {}
    async with await engine.submit(known.skill, source, dict(known.arguments), settings) as stream:
        return await stream.result()


def _compared(known: KnownAnswer, result: EngineResult, where: str) -> Finding:
    output = result.output
    expected: object = known.output
    found: object = {name: output.get(name) for name in known.output} or output
    if known.grounds:
        each = [len(ground["points"]) for ground in output["reasoning"]["grounding"]]
        expected = {**known.output, "grounds": [known.grounds] * max(1, len(each))}
        found = {**{name: output.get(name) for name in known.output}, "grounds": each}
    distance = 0.0
    if known.token_ids:
        expected, found = list(known.token_ids), list(result.token_ids)
        distance = 0.0 if expected == found else float("inf")
    elif known.says:
        expected = f"words with {known.says!r}"
        distance = 0.0 if known.says in str(output).lower() else float("inf")
    elif known.at_least:
        expected = f"at least {known.at_least}"
        distance = 0.0 if len(output["objects"]) >= known.at_least else float("inf")
    else:
        distance = distance_of(expected, found)
    if distance <= TOLERANCE:
        exact = "" if distance == 0 else f", within {distance:.4f} of the image"
        return Finding("answer", "ok", f"{known.request} {where}: as known{exact}")
    message = f"{known.request} {where}: {_short(found)} instead of {_short(expected)}"
    remedy = "report the difference"
    if known.picture is not None and not known.picture.is_at_hand:
        remedy = f"check that the picture is {known.picture.described}; if it is, {remedy}"
    return Finding("answer", "fail" if known.is_sure else "warn", message, remedy)


async def _speed(
    engine: InferenceEngine,
    precision: str,
    documented: Mapping[tuple[str, str], tuple[float, float]],
) -> Finding:
    """Measures one caller: the first token about a new picture, and the further ones."""
    random = np.random.default_rng(0)
    first_ms = token_ms = float("inf")
    for _ in range(3):
        picture = random.integers(0, 256, (756, 1008, 3), np.uint8)
        settings = {"temperature": 0.0, "max_tokens": _TOKENS}
        async with await engine.submit("caption", picture, {}, settings) as stream:
            metrics = (await stream.result()).metrics
        first_ms = min(first_ms, metrics.ttft_ms)
        if metrics.output_tokens > 1:
            token_ms = min(token_ms, metrics.decode_time_ms / (metrics.output_tokens - 1))
    info = engine.info
    message = f"first token about a new picture after {first_ms:.1f} ms"
    if token_ms < float("inf"):
        message += f", then {token_ms:.2f} ms a token"
    for (card, dtype), (first, token) in documented.items():
        if card in info.device_name and dtype == (info.dtype if precision == "auto" else precision):
            message += f"; documented for the {card}: {first} and {token} ms"
            if first_ms > _SLOWER * first or token_ms > _SLOWER * token:
                return Finding("speed", "warn", message, "docs/run/operations.md, Slow answers")
    return Finding("speed", "ok", message)


def _memory(estimate: str, device: str) -> Finding:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = peak * (1 if sys.platform == "darwin" else 1024)
    message = f"at most {host / 2**30:.2f} GiB of this process"
    if device.startswith("cuda"):
        import torch

        message += f", {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB of the card"
    if estimate:
        message += f"; doctor: {estimate}"
    return Finding("memory", "ok", message)


def distance_of(expected: object, found: object) -> float:
    """Returns the largest difference between corresponding numbers; infinity if anything else differs, but for keys
    that only ``found`` has."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        if not expected.keys() <= found.keys():
            return float("inf")
        return max((distance_of(expected[key], found[key]) for key in expected), default=0.0)
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return float("inf")
        return max((distance_of(a, b) for a, b in zip(expected, found, strict=True)), default=0.0)
    if isinstance(expected, float) and isinstance(found, float):
        return abs(expected - found)
    return 0.0 if expected == found else float("inf")


def _short(output: Any) -> str:
    if isinstance(output, float):
        return f"{output:.4f}"
    if isinstance(output, Mapping):
        return ", ".join(f"{key} {_short(value)}" for key, value in output.items())
    if isinstance(output, list):
        return f"[{'; '.join(map(_short, output))}]"
    return output if isinstance(output, str) else repr(output)
