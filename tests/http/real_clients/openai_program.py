"""A program of the unmodified ``openai`` package, run in an environment of its own: BASE_URL KEY IMAGE."""

import base64
import json
import sys

import openai

base_url, key, path = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
with open(path, "rb") as file:
    url = "data:image/jpeg;base64," + base64.b64encode(file.read()).decode()


def ask(text, **options):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return client.chat.completions.create(
        model="moondream2",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        **options,
    )


question = "How many red circles are there?"
whole = ask(question)
stream = list(ask(question, stream=True, stream_options={"include_usage": True}))
scored = ask("Describe this image.", logprobs=True, top_logprobs=3).choices[0]
scored_stream = list(ask("Describe this image.", logprobs=True, top_logprobs=3, stream=True))
completed = client.completions.create(
    model="moondream", prompt="How many?", logprobs=2, temperature=0, max_tokens=4
).choices[0]
out = {
    "answer": whole.choices[0].message.content,
    "finish_reason": whole.choices[0].finish_reason,
    "tokens": whole.usage.completion_tokens,
    "stream": "".join(c.choices[0].delta.content or "" for c in stream if c.choices),
    "stream_tokens": stream[-1].usage.completion_tokens,
    "described": ask("Describe this image.").choices[0].message.content,
    "scored": bytes(b for t in scored.logprobs.content for b in t.bytes).decode(),
    "logprobs": [token.logprob for token in scored.logprobs.content],
    "top": [[each.token for each in t.top_logprobs] for t in scored.logprobs.content],
    "top_stream": [
        [each.token for each in token.top_logprobs]
        for chunk in scored_stream
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ],
    "tokens_scored": [token.token for token in scored.logprobs.content],
    "completed": [
        len(completed.logprobs.tokens),
        len(completed.logprobs.token_logprobs),
        [len(top) for top in completed.logprobs.top_logprobs],
        completed.logprobs.text_offset[0],
    ],
    "stopped": ask("Describe this image.", stop=["two"]).choices[0].message.content,
    "choices": [c.message.content for c in ask(question, n=3).choices],
    "boxes": json.loads(ask("Detect: green crescent").choices[0].message.content),
    "models": [model.id for model in client.models.list()],
    "model": client.models.retrieve("kestrel-tiny").id,
}
try:
    ask(question, n=99)
except openai.BadRequestError as error:
    out["bad_request"] = [error.param, error.status_code]
try:
    openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).models.list()
except openai.AuthenticationError as error:
    out["wrong_key"] = error.code
print(json.dumps(out))
