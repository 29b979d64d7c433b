"""A program of the unmodified ``ollama`` package, run in an environment of its own: HOST KEY IMAGE."""

import json
import sys

import ollama

host, key, path = sys.argv[1:]
client = ollama.Client(host=host.removesuffix("/v1"), headers={"Authorization": f"Bearer {key}"})
with open(path, "rb") as file:
    image = file.read()
question, options = "How many red circles are there?", {"temperature": 0}
model = "moondream:latest"
whole = client.generate(model=model, prompt=question, images=[image], options=options)
messages = [{"role": "user", "content": question, "images": [image]}]
chat = client.chat(model=model, messages=messages, options=options, stream=True)
out = {
    "generate": whole.response,
    "done_reason": whole.done_reason,
    "eval_count": whole.eval_count,
    "chat": "".join(part.message.content for part in chat),
    "models": [each.model for each in client.list().models],
    "capabilities": client.show(model).capabilities,
    "load": client.generate(model=model).done_reason,
}
try:
    client.generate(model="llava", prompt="Hello?")
except ollama.ResponseError as error:
    out["wrong_model"] = [error.status_code, "llava" in error.error]
print(json.dumps(out))
