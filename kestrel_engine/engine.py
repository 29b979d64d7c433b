"""InferenceEngine: the async front of one model.

Owns admission and the open streams, on one event loop; the step thread owns the rest (loop.py). A request goes: checked
by its skill, picture prepared in the pool, prompt built, handed to the loop; updates come back once a step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import secrets
import time
import uuid
from collections.abc import Mapping
from typing import Any

from .calls import SkillCalls
from .config import RuntimeConfig
from .errors import (
    ContextLengthError,
    EngineClosed,
    EngineOverloaded,
    InvalidRequest,
    RequestCancelled,
)
from .events import EngineMetrics, EngineResult, StreamUpdate
from .factory import Built, Progress, build
from .info import EngineInfo
from .loop import Delivery, EngineLoop, Finished, Work
from .preprocess.pool import PreprocessPool
from .requests import ImageBlock, PreparedImage, Prompt, num_positions
from .scheduler.sequence import Sequence as ScheduledSequence
from .skills.base import SkillContext, SkillDefaults, SkillRequest
from .skills.registry import SkillRegistry
from .stream import EngineStream
from .timings import RequestTimings

__all__ = ["EngineMetrics", "EngineResult", "EngineStream", "InferenceEngine", "StreamUpdate"]

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_LENGTH = 128
"""Characters of a caller's request id: it goes into every log line."""


@dataclasses.dataclass(slots=True)
class _Open:
    """An accepted request whose outcome has not come back."""

    stream: EngineStream
    timings: RequestTimings
    input_tokens: int
    image: PreparedImage | None
    seed: int


class InferenceEngine(SkillCalls):
    """Serves the skills of one model. Made by ``create``; used from the event loop that created it."""

    def __init__(
        self, config: RuntimeConfig, built: Built, skills: SkillRegistry | None = None
    ) -> None:
        """Takes a built runtime; ``create`` is the usual way in. Must be called on a running event loop."""
        self._config = config
        self._built = built
        registry = skills or SkillRegistry.default()
        self._skills = registry
        available = [n for n in registry.names if n != "segment" or "segment" in built.model.skills]
        self.info: EngineInfo = dataclasses.replace(built.info, skills=tuple(available))
        """What this engine serves."""
        self._context = SkillContext(
            model=built.model,
            codec=built.codec,
            defaults=SkillDefaults(
                max_tokens=config.default_max_tokens,
                temperature=config.default_temperature,
                top_p=config.default_top_p,
                max_objects=config.default_max_objects,
                max_text_bytes=config.max_text_bytes,
            ),
        )
        self._pool = PreprocessPool(
            config.preprocess_threads, config.image_limits, built.model.vision
        )
        self._limits = built.runtime.limits
        self._aio = asyncio.get_running_loop()
        self._loop = EngineLoop(built.runtime, self._deliver_threadsafe)
        self._loop.start()
        self._ids = itertools.count(1)
        self._open: dict[int, _Open] = {}
        self._preparing = 0
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._seeds = itertools.count(config.seed) if config.seed is not None else None

    @classmethod
    async def create(
        cls,
        config: RuntimeConfig | None = None,
        *,
        skills: SkillRegistry | None = None,
        api_key: str | None = None,
        progress: Progress | None = None,
    ) -> InferenceEngine:
        """Loads the model off the event loop and warms it up.

        ``api_key`` (or MOONDREAM_API_KEY) is accepted for callers of the vendor's engine and not needed. ``progress``
        is called with (done bytes, total bytes, what). Raises ConfigError or ModelLoadError.
        """
        config = config or RuntimeConfig()
        built = await asyncio.to_thread(build, config, progress)
        engine = cls(config, built, skills)
        try:
            await engine._warm_up()
        except BaseException:
            await engine.shutdown(grace_s=0)
            raise
        return engine

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken up now."""
        return not self._closing and self._loop.alive

    @property
    def num_requests(self) -> int:
        """Requests accepted and unfinished."""
        return len(self._open) + self._preparing

    async def submit(
        self,
        skill: str,
        image: Any = None,
        arguments: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
    ) -> EngineStream:
        """Starts any registered skill and returns its stream once the picture is prepared and the request queued.

        Raises RequestError, EngineOverloaded, EngineClosed; later failures come through the stream.
        """
        self._check_admission()
        request_id = _checked_request_id(request_id)
        timings = RequestTimings(accepted_at=time.monotonic())
        spec = self._skills.get(skill)
        request = spec.build(arguments or {}, settings or {}, self._context)
        if image is None and request.needs_image:
            raise InvalidRequest("image", "is required")
        prepared = await self._prepare(image, timings) if image is not None else None
        if self._closing:
            raise EngineClosed("the engine is shutting down")
        prompt = self._prompt(request, prepared)
        max_tokens = self._token_limit(request, num_positions(prompt))
        sequence_id = next(self._ids)
        seed = self._seed(request)
        state = spec.new_state(request, max_tokens, self._context)
        sequence = ScheduledSequence(
            sequence_id=sequence_id,
            prompt=prompt,
            image=prepared,
            sampling=dataclasses.replace(request.sampling, seed=seed),
            rule=state.rule(),
            max_tokens=max_tokens,
        )
        stream = EngineStream(request_id, lambda: self._loop.abort(sequence_id))
        self._open[sequence_id] = _Open(stream, timings, num_positions(prompt), prepared, seed)
        self._idle.clear()
        self._loop.submit(Work(sequence, state, timings))
        return stream

    async def shutdown(self, *, grace_s: float = 10.0) -> None:
        """Takes no more requests, lets the running ones end for up to ``grace_s`` seconds, fails the rest with
        EngineClosed, and frees the model. Idempotent."""
        self._closing = True
        if self.num_requests and grace_s > 0:
            try:
                await asyncio.wait_for(self._idle.wait(), grace_s)
            except TimeoutError:
                logger.warning(
                    "%d requests were unfinished after %.1f s", self.num_requests, grace_s
                )
        await asyncio.to_thread(self._loop.stop)
        await asyncio.sleep(0)  # Lets the last deliveries reach their streams.
        for opened in self._open.values():
            opened.stream.fail(EngineClosed("the engine was shut down"))
        self._open.clear()
        await asyncio.to_thread(self._pool.close)

    async def __aenter__(self) -> InferenceEngine:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def _call(
        self,
        skill: str,
        image: Any,
        arguments: Mapping[str, Any],
        settings: Mapping[str, Any] | None,
        stream: bool,
        request_id: str | None,
    ) -> EngineResult | EngineStream:
        started = await self.submit(skill, image, arguments, settings, request_id=request_id)
        if stream:
            return started
        async with started:
            return await started.result()

    def _check_admission(self) -> None:
        if self._closing:
            raise EngineClosed("the engine is shutting down")
        if not self._loop.alive:
            raise EngineClosed("the engine's step thread has died")
        bound = self._config.max_queue + self._config.max_batch_size
        if self.num_requests >= bound:
            raise EngineOverloaded(
                f"{self.num_requests} requests are running or waiting; the bound is {bound} "
                f"(max_queue={self._config.max_queue} + max_batch_size={self._config.max_batch_size})"
            )

    async def _prepare(self, image: Any, timings: RequestTimings) -> PreparedImage:
        self._preparing += 1
        self._idle.clear()
        try:
            prepared = await self._pool.prepare(image)
        finally:
            self._preparing -= 1
            self._note_idle()
        timings.preprocess_s = prepared.seconds
        return prepared.image

    def _prompt(self, request: SkillRequest, image: PreparedImage | None) -> Prompt:
        bos = self._context.model.ids.bos_id
        block = (
            () if image is None else (ImageBlock(image.key, self._context.model.image_positions),)
        )
        return (bos, *block, *request.prompt_suffix)

    def _token_limit(self, request: SkillRequest, prompt_positions: int) -> int:
        """Most tokens to sample. An explicit max_tokens beyond the room is refused, a default shrinks."""
        room = self._limits.max_seq_length - prompt_positions
        if room < 1:
            raise ContextLengthError(
                "question" if request.skill == "query" else "object",
                f"the prompt takes {prompt_positions} positions; the context has {self._limits.max_seq_length}",
            )
        if request.max_tokens is not None and request.max_tokens > room:
            raise ContextLengthError(
                "max_tokens",
                f"{request.max_tokens} exceeds the {room} positions left after a prompt of {prompt_positions} "
                f"in a context of {self._limits.max_seq_length}",
            )
        wanted = request.token_budget or request.max_tokens or self._context.defaults.max_tokens
        return min(wanted, room)

    def _seed(self, request: SkillRequest) -> int:
        if request.seed is not None:
            return request.seed
        return next(self._seeds) % 2**64 if self._seeds is not None else secrets.randbits(63)

    def _deliver_threadsafe(self, deliveries: list[Delivery]) -> None:
        """On the step thread."""
        try:
            self._aio.call_soon_threadsafe(self._deliver, deliveries)
        except RuntimeError:  # The event loop is closed: nobody is left to be told.
            logger.debug("dropped %d deliveries: the event loop is closed", len(deliveries))

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            opened = self._open.get(delivery.sequence_id)
            if opened is None:
                continue
            for update in delivery.updates:
                opened.stream.push(
                    dataclasses.replace(
                        update,
                        request_id=opened.stream.request_id,
                        token_index=delivery.token_index,
                    )
                )
            if delivery.outcome is None:
                continue
            del self._open[delivery.sequence_id]
            if isinstance(delivery.outcome, Finished):
                opened.stream.finish(self._result(opened, delivery.outcome))
            elif isinstance(delivery.outcome, RequestCancelled):
                opened.stream.cancelled()
            else:
                opened.stream.fail(delivery.outcome)
        self._note_idle()

    def _result(self, opened: _Open, finished: Finished) -> EngineResult:
        image = opened.image
        return EngineResult(
            request_id=opened.stream.request_id,
            output=finished.output,
            finish_reason=finished.reason,
            token_ids=finished.token_ids,
            metrics=opened.timings.metrics(
                input_tokens=opened.input_tokens, output_tokens=len(finished.token_ids)
            ),
            model=self.info.model,
            image_size=None if image is None else (image.width, image.height),
            seed=opened.seed,
        )

    def _note_idle(self) -> None:
        if self.num_requests == 0:
            self._idle.set()

    async def _warm_up(self) -> None:
        """One short text request through the whole path: lazy initialisation is paid before the first caller."""
        settings = {"max_tokens": 2, "temperature": 0.0}
        await self.query(question="ready?", settings=settings)


def _checked_request_id(request_id: str | None) -> str:
    if request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request_id, str) or not request_id.isprintable() or not request_id:
        raise InvalidRequest("request_id", "must be printable text")
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequest(
            "request_id", f"has {len(request_id)} characters, the limit is {MAX_REQUEST_ID_LENGTH}"
        )
    return request_id
