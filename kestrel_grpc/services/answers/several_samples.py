"""Query and Caption with several samples (``num_samples``): each is a request of the engine with a seed of its own.

The images are prepared once, and the requests share their prefix. Unlike the tasks of Analyze, the samples stand or
fall together: the first that fails ends the others and is the error of the call.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TypeVar

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineStream, InvalidRequest, clock

from ...edge.calls.current_call import current_call
from ..messages.calls import SkillCall
from ..messages.images import at_image
from ..messages.responses import timings_of_several, usage_message
from .starting import Respond, SharedImage, Starter, add_image_ids, submit
from .total_result import total_result

MAX_SAMPLES = 16

TextResponse = TypeVar("TextResponse", pb.QueryResponse, pb.CaptionResponse)


def num_samples(request: pb.QueryRequest | pb.CaptionRequest) -> int:
    """Raises InvalidRequest."""
    wanted = request.num_samples if request.HasField("num_samples") else 1
    if not 1 <= wanted <= MAX_SAMPLES:
        raise InvalidRequest("num_samples", f"{wanted} is not in [1, {MAX_SAMPLES}]")
    return wanted


def check_single(request: pb.QueryRequest | pb.CaptionRequest) -> None:
    """Raises InvalidRequest if a stream is asked for several samples."""
    wanted = num_samples(request)
    if wanted > 1:
        raise InvalidRequest(
            "num_samples",
            f"must be 1 in a stream, got {wanted}; open a stream for each sample, with seeds of your choice",
        )


async def draw_samples(
    starter: Starter, call: SkillCall, count: int, respond: Respond[TextResponse]
) -> TextResponse:
    """The response that holds ``count`` samples. Raises the error of the first sample that fails."""
    began = clock.now()
    edge, engine = current_call(), starter.served.engine(call.options.model)
    images: list[SharedImage] = []
    for path, source in call.images:
        with at_image(path):
            images.append(await starter.prepare(call.options, source))
    given = call.settings.get("seed")
    seed = engine.draw_seed(count) if given is None else given
    seeds = [(seed + index) % 2**64 for index in range(count)]
    arguments = {**call.arguments}
    streams: list[EngineStream] = []
    try:
        for own in seeds:
            asked = replace(call, arguments=arguments, settings={**call.settings, "seed": own})
            streams.append(await submit(engine, asked, [image.prepared for image in images]))
            # The first sample looks for the objects that the question presupposes, for all of them.
            if arguments.pop("presupposes", None) and await _has_abstained(streams[0]):
                break
        await edge.accept()
        results = await asyncio.gather(*(stream.result() for stream in streams))
    finally:
        await asyncio.gather(*(stream.aclose() for stream in streams))
    edge.result = total_result(edge.request_id, [result.metrics for result in results])
    image_tokens = engine.info.image_positions * len(images) * sum(r.num_looks for r in results)
    drawn = results if len(results) == count else [replace(results[0], seed=s) for s in seeds]
    samples = []
    for each in drawn:
        result = replace(each, absences=drawn[0].absences)
        samples.append(respond(result, engine.info.image_positions))
        # Log-probabilities with alternatives take some 50 us a token, so other calls get their turn.
        await asyncio.sleep(0)
    if images:
        for sample, result in zip(samples, drawn, strict=True):
            add_image_ids(sample, call, result, [image.image_id for image in images])
    response = type(samples[0])()
    response.CopyFrom(samples[0])
    response.samples.extend(samples)
    used, total_time_ms = edge.result.metrics, 1e3 * (clock.now() - began)
    response.usage.CopyFrom(usage_message(used, image_tokens))
    response.timings.CopyFrom(timings_of_several(used, total_time_ms))
    return response


async def _has_abstained(stream: EngineStream) -> bool:
    return stream.done and (await stream.result()).abstained
