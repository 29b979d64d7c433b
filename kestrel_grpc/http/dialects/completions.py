"""OpenAI's older interface: /v1/completions. Each prompt is a question without an image, and its answer the completion.

A list of prompts becomes as many Queries, of which a few run at once. They stand or fall together.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import EngineResult, FieldPath, InvalidRequest, RequestError

from ...edge.calls.call import Context
from ...edge.calls.current import current
from ...edge.messages.fields import take_options
from ...services.answers.several import total_result
from ..edge import Endpoints, ServiceCall
from ..fields import Fields
from ..forms import sent_event
from ..services import HttpServices
from .asking import fill, query_endpoint
from .known_fields import COMPLETIONS
from .openai import fill_top_logprobs, head, reason_of, samples, usage_json

MOST_PROMPTS = 256
_PLACE: FieldPath = ("requests",)
"""Begins the path of an error of one of several requests. Its place follows."""
_AT_ONCE = 16
"""Prompts of one request that the engine has at a time."""
_Behaviour = Callable[[Any, Context], Awaitable[Any]]


def endpoints(services: HttpServices) -> Endpoints:
    complete = query_endpoint(partial(_complete, services), COMPLETIONS)
    return {("POST", "/v1/completions"): complete}


def _complete(services: HttpServices, fields: Fields) -> ServiceCall:
    COMPLETIONS.check(fields)
    if fields.whole("best_of") not in (None, samples(fields)):
        raise InvalidRequest("best_of", f"must be equal to n, got {fields.values['best_of']}")
    prompts = _prompts(fields)
    streams = fields.flag("stream")
    usage = fields.inner("stream_options").flag("include_usage")
    if streams and len(prompts) > 1:
        raise InvalidRequest("prompt", f"must be one text in a stream, got {len(prompts)}")
    requests = []
    for prompt in prompts:
        request = pb.QueryRequest()
        task = request.query
        task.question, task.num_samples = prompt, samples(fields)
        rename = fill(task, request.options, fields, services.names)
        if fields.values.get("logprobs") is not None and fields.values["logprobs"] is not False:
            fill_top_logprobs(task, fields, "logprobs")
            task.text.logprobs = True
        requests.append(request)

    is_list = isinstance(fields.values["prompt"], list)

    def name(path: FieldPath) -> FieldPath:
        place: FieldPath = ()
        if path[:1] == _PLACE:
            place, path = path[1:2], path[2:]
        named = rename(path)
        return ("prompt", *(place if is_list else ())) if named == ("messages",) else named

    vision = services.vision
    if streams:
        return ServiceCall(requests[0], vision.StreamQuery, _completion, _chunks(usage), name)
    return ServiceCall(requests, _answer_all(vision.Query), _completion, rename=name)


def _prompts(fields: Fields) -> Sequence[str]:
    given = fields.values.get("prompt")
    ids = given[0] if isinstance(given, list) and given and isinstance(given[0], list) else given
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        raise InvalidRequest("prompt", "must be text; the server takes no token ids")
    prompts = fields.texts("prompt")
    if not 1 <= len(prompts) <= MOST_PROMPTS:
        raise InvalidRequest("prompt", f"must be 1 to {MOST_PROMPTS} texts, got {len(prompts)}")
    for index, prompt in enumerate(prompts):
        if not prompt.strip():
            raise InvalidRequest(
                "prompt" if isinstance(given, str) else ("prompt", index), "must not be empty"
            )
    return prompts


def _answer_all(answer: _Behaviour) -> _Behaviour:
    """A behaviour that answers a list of requests. The first error ends all, and its path begins with the request's
    place."""

    async def answer_all(requests: Sequence[Any], context: Context) -> list[Any]:
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(place: int, request: Any) -> tuple[Any, EngineResult | None]:
            async with room:
                # It holds the options and the result of this request.
                call = replace(current.get(), message=request)
                take_options(call)
                current.set(call)
                try:
                    return await answer(request, context), call.result
                except RequestError as error:
                    raise error.at((*_PLACE, place, *error.path)) from error

        tasks = [asyncio.create_task(one(*each)) for each in enumerate(requests)]
        try:
            done = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        call = current.get()
        metrics = [result.metrics for _, result in done if result is not None]
        call.result = total_result(call.request_id, metrics)
        return [response for response, _ in done]

    return answer_all


def _completion(responses: Sequence[pb.QueryResponse]) -> dict[str, Any]:
    answers = [answer for each in responses for answer in each.answers]
    total: dict[str, Any] = {}
    for each in responses:
        for key, value in usage_json(each).items():
            if isinstance(value, int):
                total[key] = total.get(key, 0) + value
    return {
        **_head(responses[0].info),
        "choices": [
            _choice(
                index,
                each.text,
                reason_of(each),
                _TokenLists().of(each.logprobs.tokens) if each.HasField("logprobs") else None,
            )
            for index, each in enumerate(answers)
        ],
        "usage": total,
    }


def _chunks(usage: bool) -> Callable[[Any], Iterable[bytes]]:
    """The events of a streamed Query; ``usage``: whether a last chunk has the number of tokens."""
    head: dict[str, Any] = {}
    lists = _TokenLists()

    def events(message: Any) -> Iterable[bytes]:
        nonlocal head
        kind = message.WhichOneof("event")
        if kind == "started":
            head = _head(message.started)
        elif kind == "text_delta":
            delta = message.text_delta
            tokens = lists.of(delta.tokens) if delta.tokens else None
            choice = _choice(0, delta.text, None, tokens)
            yield sent_event({**head, "choices": [choice]})
        elif kind == "final":
            (answer,) = message.final.answers
            scores = answer.HasField("logprobs") and not answer.logprobs.tokens
            choice = _choice(0, "", reason_of(answer), lists.of(()) if scores else None)
            yield sent_event({**head, "choices": [choice]})
            if usage:
                yield sent_event({**head, "choices": [], "usage": usage_json(message.final)})
            yield b"data: [DONE]\n\n"

    return events


def _head(info: common_pb2.RequestInfo) -> dict[str, Any]:
    return head(info, "cmpl", "text_completion")


def _choice(
    index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _TokenLists:
    """Converts the tokens of one completion to lists, part by part. ``text_offset`` counts characters from the
    beginning of the completion."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, tokens: Sequence[common_pb2.TokenLogprob]) -> dict[str, Any]:
        """Alternatives include the token itself, as in OpenAI's interface."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.utf8))
        tops = [_top(token) for token in tokens]
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(token.top for token in tokens) else None,
            "text_offset": offsets,
        }


def _top(token: common_pb2.TokenLogprob) -> dict[str, float]:
    found: dict[str, float] = {}
    for each in (*token.top, token):
        found.setdefault(_name(each), each.logprob)  # Of equal texts, the likeliest counts.
    return found


def _name(token: common_pb2.TokenLogprob) -> str:
    """The token's text. A part of a character is shown by its bytes, as in OpenAI's interface."""
    try:
        return token.utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.utf8)
