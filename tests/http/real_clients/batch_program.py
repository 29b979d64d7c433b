"""A program of the unmodified ``openai`` package for batches, run in an environment of its own: BASE_URL KEY IMAGE."""

import base64
import json
import sys

import openai

base_url, key, path = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
with open(path, "rb") as file:
    url = "data:image/jpeg;base64," + base64.b64encode(file.read()).decode()


def row(name, text):
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text}]
    body = {"input": [{"role": "user", "content": parts}], "temperature": 0}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body})


rows = "\n".join([row("a", "How many red circles are there?"), row("b", "Detect: green crescent")])
file = client.files.create(file=("rows.jsonl", rows.encode()), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id, endpoint="/v1/responses", completion_window="24h", metadata={"a": "b"}
)
created = batch.status
while batch.status == "in_progress":
    batch = client.batches.retrieve(batch.id)
lines = client.files.content(batch.output_file_id).text.splitlines()
out = {
    "created": created,
    "status": batch.status,
    "counts": [batch.request_counts.completed, batch.request_counts.failed],
    "texts": [
        json.loads(line)["response"]["body"]["output"][-1]["content"][0]["text"] for line in lines
    ],
    "batches": [each.id == batch.id for each in client.batches.list(limit=1)],
    "files": len(list(client.files.list())),
    "deleted": client.files.delete(file.id).deleted,
}
try:
    client.files.retrieve(file.id)
except openai.NotFoundError as error:
    out["gone"] = error.code
print(json.dumps(out))
