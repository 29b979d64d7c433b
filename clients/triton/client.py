#!/usr/bin/env python3
"""Asks the model `moondream` by KServe's protocol, of kestrel-grpc or of a Triton server (deploy/triton).

pip install 'tritonclient[grpc]' numpy
python clients/triton/client.py --url 127.0.0.1:50051 --image picture.jpg --question "What is this?"
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton

_DATATYPES = {bool: ("BOOL", np.bool_), int: ("INT32", np.int32), float: ("FP32", np.float32)}
"""By the type of the value. Others are BYTES."""


def tensors(**inputs: Any) -> list[triton.InferInput]:
    """The inputs of a request. Texts and bytes, numbers and flags by name; None leaves an input out."""
    made = []
    for name, value in inputs.items():
        if value is None:
            continue
        datatype, kind = _DATATYPES.get(type(value), ("BYTES", np.object_))
        data = value.encode() if isinstance(value, str) else value
        tensor = triton.InferInput(name, [1], datatype)
        tensor.set_data_from_numpy(np.array([data], dtype=kind))
        made.append(tensor)
    return made


def answers(
    client: triton.InferenceServerClient, token: str | None = None, **inputs: Any
) -> Iterator[dict[str, Any]]:
    """The JSON of each response. Raises InferenceServerException."""
    headers = {"authorization": f"Bearer {token}"} if token else None
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client.start_stream(lambda result, error: arrived.put((result, error)), headers=headers)
    try:
        try:
            client.async_stream_infer("moondream", tensors(**inputs))
        except triton.InferenceServerException:
            # The server has ended the stream already. The callback gets the reason.
            raise arrived.get()[1] from None
        is_final = False
        while not is_final:
            result, error = arrived.get()
            if error is not None:
                raise error
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            output = result.as_numpy("TEXT_OUTPUT")
            if output is not None:  # A Triton server may end with an empty response.
                yield json.loads(output[0])
    finally:
        client.stop_stream()


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask the model moondream by KServe's protocol.")
    parser.add_argument("--url", default="127.0.0.1:50051", help="address of the server")
    parser.add_argument("--image", required=True, help="the image file")
    parser.add_argument("--token", default=os.environ.get("KESTREL_TOKEN"), help="$KESTREL_TOKEN")
    parser.add_argument("--question", default="What is in this image?")
    parser.add_argument("--object", default="object", help="what to detect and to point at")
    options = parser.parse_args()
    with open(options.image, "rb") as file:
        image = file.read()
    try:
        with triton.InferenceServerClient(options.url) as client:
            shared = {"client": client, "token": options.token, "IMAGE": image, "TEMPERATURE": 0.0}
            for answer in answers(**shared, SKILL="query", QUESTION=options.question):
                print("query:  ", answer["answer"])
            print("caption: ", end="")
            for piece in answers(**shared, SKILL="caption", LENGTH="short", STREAM=True):
                print(piece["chunk"], end="", flush=True)
            print()
            for skill, found in (("detect", "objects"), ("point", "points")):
                for answer in answers(**shared, SKILL=skill, OBJECT=options.object):
                    print(f"{skill + ':':8}", answer[found])
    except triton.InferenceServerException as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
