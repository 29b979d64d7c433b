"""A program of the unmodified ``openai`` package for Responses, in an environment of its own: BASE_URL KEY IMAGE."""

import base64
import json
import sys

import openai
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

base_url, key, path = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
with open(path, "rb") as file:
    url = "data:image/jpeg;base64," + base64.b64encode(file.read()).decode()
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


class Seen(pydantic.BaseModel):
    any_red: bool


def asked(text, **options):
    content = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": text},
    ]
    given = [{"role": "user", "content": content}]
    return {"model": "moondream2", "input": given, "temperature": 0, **options}


def events_of(**options):
    """The events of a stream, each of which the package's own types accept as it was sent."""
    found = []
    with client.responses.with_streaming_response.create(stream=True, **options) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(EVENT.validate_json(line[6:], strict=True))
    return found


question = "How many red circles are there?"
sent = client.responses.with_raw_response.create(**asked(question))
Response.model_validate_json(sent.content, strict=True)
whole = sent.parse()
stream = list(client.responses.create(stream=True, **asked(question)))
reasoned = asked(question, reasoning={"effort": "high"})
with client.responses.stream(**reasoned) as helped:
    kinds = {event.type for event in helped}
    final = helped.get_final_response()
before = whole.output[0].to_dict()
again = [*asked(question)["input"], *[item.to_dict() for item in final.output], before]
parsed = client.responses.parse(text_format=Seen, **asked("Are there red circles?"))
out = {
    "answer": whole.output_text,
    "status": whole.status,
    "tokens": whole.usage.output_tokens,
    "input_tokens": whole.usage.input_tokens,
    "counted": client.responses.input_tokens.count(
        model="moondream2", input=asked(question)["input"]
    ).input_tokens,
    "stream": "".join(e.delta for e in stream if e.type == "response.output_text.delta"),
    "last": stream[-1].type,
    "kinds": sorted(kinds),
    "reasoning": [item.summary[0].text for item in final.output if item.type == "reasoning"],
    "reasoned": final.output_text,
    "again": client.responses.create(
        model="moondream2", input=[*again, {"role": "user", "content": question}], store=True
    ).status,
    "parsed": parsed.output_parsed.any_red,
    "cut": events_of(**asked("Describe this image.", max_output_tokens=2))[-1].type,
    "valid": len(events_of(**reasoned)),
}
with client.responses.create(stream=True, **asked("Describe this image.")) as cancelled:
    out["cancelled"] = next(iter(cancelled)).type
try:
    client.responses.create(previous_response_id=whole.id, **asked(question))
except openai.BadRequestError as error:
    out["bad_request"] = [error.param, error.status_code]
try:
    openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).responses.create(input="a")
except openai.AuthenticationError as error:
    out["wrong_key"] = error.code
print(json.dumps(out))
