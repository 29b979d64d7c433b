"""A program of the unmodified package ``connectrpc``, with what its plugins generate from the protos, in an environment
of its own: ADDRESS KEY IMAGE. Prints JSON."""

import json
import sys

from connectrpc.codec import proto_binary_codec, proto_json_codec
from connectrpc.compression.gzip import GzipCompression
from connectrpc.errors import ConnectError
from generated.kestrel.v1.common_pb import Image, Sampling
from generated.kestrel.v1.image_service_connect import ImageServiceClientSync
from generated.kestrel.v1.image_service_pb import UploadImageRequest, UploadInfo
from generated.kestrel.v1.model_service_connect import ModelServiceClientSync
from generated.kestrel.v1.model_service_pb import ListModelsRequest
from generated.kestrel.v1.vision_service_connect import VisionServiceClientSync
from generated.kestrel.v1.vision_service_pb import (
    CaptionRequest,
    CaptionTask,
    QueryRequest,
    QueryTask,
)
from protobuf import Oneof

address, key, path = sys.argv[1:]
headers = {"authorization": f"Bearer {key}"}
with open(path, "rb") as file:
    data = file.read()


def failure(call) -> list[str]:
    try:
        call()
    except ConnectError as error:
        return [error.code.value, error.message]
    return []


def run(**options):
    vision, images, models = (
        kind(address, **options)
        for kind in (VisionServiceClientSync, ImageServiceClientSync, ModelServiceClientSync)
    )

    def asked(question: str, **sampling) -> QueryRequest:
        task = QueryTask(question=question, sampling=Sampling(temperature=0, **sampling))
        return QueryRequest(images=[Image(source=Oneof("encoded", data))], query=task)

    parts = [UploadImageRequest(part=Oneof("info", UploadInfo()))]
    for start in range(0, len(data), 10_000):
        parts.append(UploadImageRequest(part=Oneof("chunk", data[start : start + 10_000])))
    stored = images.upload_image(iter(parts), headers=headers).image.image_id
    caption = CaptionRequest(image=Image(source=Oneof("image_id", stored)), caption=CaptionTask())
    events = list(vision.stream_caption(caption, headers=headers))
    whole = vision.caption(caption, headers=headers).captions[0].text
    texts = [each.event.value.text for each in events if each.event.field == "text_delta"]
    question = "How many red circles are there?"
    listed = [
        models.list_models(ListModelsRequest(), headers=headers, use_get=use_get).models[0].name
        for use_get in (False, True)
    ]
    return {
        "answer": vision.query(asked(question), headers=headers).answers[0].text,
        "streamed": len(texts) > 1 and "".join(texts) == whole,
        "models": listed,
        "wrong_field": failure(lambda: vision.query(asked(question, top_p=2), headers=headers)),
        "wrong_key": failure(lambda: vision.query(asked(question)))[0],
        "wrong_stream": failure(lambda: list(vision.stream_caption(CaptionRequest())))[0],
        "too_late": failure(lambda: vision.query(asked(question), headers=headers, timeout_ms=1))[
            0
        ],
    }


print(
    json.dumps(
        [
            run(codec=codec(), send_compression=compression)
            for codec in (proto_binary_codec, proto_json_codec)
            for compression in (None, GzipCompression())
        ]
    )
)
