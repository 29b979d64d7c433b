"""A real server with the fake runtime behind the real engine, and requests of the Open Inference Protocol."""

import json
import struct
from io import BytesIO
from typing import Any

from PIL import Image

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from tests.service.conftest import Serve, Served, serve

__all__ = ["Serve", "Served", "serve"]

_FORMATS = {"BOOL": "<?", "INT32": "<i", "FP32": "<f", "FP64": "<d", "INT64": "<q"}


def jpeg(width: int = 60, height: int = 40) -> bytes:
    """A grey image."""
    file = BytesIO()
    Image.new("RGB", (width, height), (200, 200, 200)).save(file, "JPEG")
    return file.getvalue()


def raw_form(datatype: str, value: Any) -> bytes:
    if datatype == "BYTES":
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<I", len(data)) + data
    return struct.pack(_FORMATS[datatype], value)


def infer(id: str = "", **inputs: Any) -> pb.ModelInferRequest:
    """A request for the model. An input is a value, or a pair of datatype and value."""
    request = pb.ModelInferRequest(model_name="moondream", id=id)
    kinds = {str: "BYTES", bytes: "BYTES", bool: "BOOL", int: "INT32", float: "FP32"}
    for name, value in inputs.items():
        datatype, value = value if isinstance(value, tuple) else (kinds[type(value)], value)
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(raw_form(datatype, value))
    return request


def output(response: pb.ModelInferResponse) -> dict[str, Any]:
    """The JSON of TEXT_OUTPUT."""
    (tensor,), (raw,) = response.outputs, response.raw_output_contents
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("TEXT_OUTPUT", "BYTES", [1])
    assert struct.unpack_from("<I", raw)[0] == len(raw) - 4
    values: dict[str, Any] = json.loads(raw[4:])
    return values
