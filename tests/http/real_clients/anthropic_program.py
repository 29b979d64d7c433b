"""A program of the unmodified ``anthropic`` package, run in an environment of its own: BASE_URL KEY IMAGE."""

import asyncio
import base64
import json
import sys

import anthropic
import pydantic
from anthropic.types import Message, RawMessageStreamEvent

base_url, key, path = sys.argv[1:]
base_url = base_url.removesuffix("/v1")
client = anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0)
with open(path, "rb") as file:
    data = base64.b64encode(file.read()).decode()
EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


class Seen(pydantic.BaseModel):
    any_red: bool


def asked(text, **options):
    source = {"type": "base64", "media_type": "image/jpeg", "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    # The package no longer has the parameter temperature.
    greedy = {"model": "moondream2", "max_tokens": 64, "extra_body": {"temperature": 0}}
    return {**greedy, "messages": messages, **options}


def events_of(**options):
    """The events of a stream, each of which the package's own types accept as it was sent."""
    found = []
    with client.messages.with_streaming_response.create(stream=True, **options) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(EVENT.validate_json(line[6:], strict=True))
    return found


async def cancelled():
    """The first event of a stream that its client leaves, and what the server then answers."""
    async with anthropic.AsyncAnthropic(
        base_url=base_url, auth_token=key, api_key=None, max_retries=0
    ) as other:
        async with await other.messages.create(stream=True, **asked("Describe this.")) as stream:
            first = await anext(aiter(stream))
        return first.type, (await other.messages.create(**asked(question))).content[0].text


question = "How many red circles are there?"
sent = client.messages.with_raw_response.create(**asked(question))
Message.model_validate_json(sent.text(), strict=True)
whole = sent.parse()
thinks = asked(question, thinking={"type": "adaptive"})
with client.messages.stream(**thinks) as helped:
    text = "".join(helped.text_stream)
    final = helped.get_final_message()
before = [*thinks["messages"], {"role": "assistant", "content": final.content}]
described = asked("Describe this image.")
out = {
    "answer": whole.content[0].text,
    "stop_reason": whole.stop_reason,
    "tokens": whole.usage.output_tokens,
    "request_id": whole._request_id == whole.id.removeprefix("msg_"),
    "input_tokens": whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
    "counted": client.messages.count_tokens(
        model="moondream2", messages=asked(question)["messages"]
    ).input_tokens,
    "stream": text,
    "blocks": [block.type for block in final.content],
    "thinking": final.content[0].thinking,
    "stream_tokens": final.usage.output_tokens,
    "again": client.messages.create(
        **{**thinks, "messages": [*before, {"role": "user", "content": question}]}
    ).stop_reason,
    "parsed": client.messages.parse(
        output_format=Seen, **asked("Are there any red circles?")
    ).parsed_output.any_red,
    "described": client.messages.create(**described).content[0].text,
    "cut": events_of(**{**described, "max_tokens": 2})[-2].delta.stop_reason,
    "valid": len(events_of(**thinks)),
    "cancelled": asyncio.run(cancelled()),
}
stopped = client.messages.create(**described, stop_sequences=["two"])
out["stopped"] = [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence]
try:
    client.messages.create(**asked(question, tools=[{"name": "a", "input_schema": {}}]))
except anthropic.BadRequestError as error:
    out["bad_request"] = [error.type, error.request_id is not None, error.api_message]
try:
    anthropic.Anthropic(base_url=base_url, api_key="wrong", max_retries=0).messages.create(
        **asked(question)
    )
except anthropic.AuthenticationError as error:
    out["wrong_key"] = error.type
print(json.dumps(out))
