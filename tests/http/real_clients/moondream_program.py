"""A program of the unmodified ``moondream`` package, run in an environment of its own: ENDPOINT KEY IMAGE."""

import base64
import json
import sys

import moondream as md
import supervision
from PIL import Image

endpoint, key, path = sys.argv[1:]
model = md.vl(endpoint=endpoint, api_key=key)
image = Image.open(path)
settings = {"temperature": 0, "max_tokens": 24}
out = {
    "query": model.query(image, "How many red circles are there?", settings=settings),
    "stream": "".join(
        model.query(image, "How many red circles are there?", stream=True, settings=settings)[
            "answer"
        ]
    ),
    "reasoning": model.query(image, "How many red circles are there?", reasoning=True),
    "text": model.query(question="What is red?", settings=settings),
    "caption": model.caption(image, length="short", settings=settings),
    "caption_stream": "".join(
        model.caption(image, length="short", stream=True, settings=settings)["caption"]
    ),
    "point": model.point(image, "green crescent"),
    "detect": model.detect(image, "green crescent", settings={"max_objects": 5}),
    "refs": model.point(image, "red circle", spatial_refs=[[0.5, 0.5], [0.1, 0.1, 0.9, 0.9]]),
}
with open(path, "rb") as file:
    url = "data:image/jpeg;base64," + base64.b64encode(file.read()).decode()
boxes = supervision.Detections.from_vlm(
    supervision.VLM.MOONDREAM, out["detect"], resolution_wh=image.size
)
out["supervision"] = [boxes.xyxy.tolist(), image.size]
messages = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "How many red circles are there?"},
        ],
    }
]
settings = {"temperature": 0, "max_tokens": 24}
out["chat"] = model.chat(messages, settings=settings)
out["chat_stream"] = "".join(model.chat(messages, stream=True, settings=settings)["message"])
print(json.dumps(out))
