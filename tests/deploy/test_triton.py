"""deploy/triton: model.py with the bundled model and a stand-in for Triton, and config.pbtxt against the model."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_grpc.kserve import model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/triton/model_repository/moondream"
FINAL = 1


class Tensor:
    def __init__(self, name: str, values: np.ndarray) -> None:
        self.name, self._values = name, values

    def as_numpy(self) -> np.ndarray:
        return self._values


class Error:
    def __init__(self, message: str) -> None:
        self.message = message


class Response:
    def __init__(self, output_tensors: Any = (), error: Error | None = None) -> None:
        self.outputs, self.error = list(output_tensors), error


class Request:
    """Also its own response sender."""

    def __init__(self, **inputs: Any) -> None:
        kinds = {float: np.float32, int: np.int32, bool: np.bool_}
        self.tensors = {
            name: Tensor(name, np.array([value], kinds.get(type(value), np.object_)))
            for name, value in inputs.items()
        }
        self.responses: list[Response] = []
        self.cancelled, self.ended, self.begun = False, threading.Event(), threading.Event()

    def request_id(self) -> str:
        return "seven"

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: Response | None = None, flags: int = 0) -> None:
        assert not self.ended.is_set(), "nothing follows the last response"
        if response is not None:
            self.responses.append(response)
        self.begun.set()
        if flags & FINAL:
            self.ended.set()

    def values(self) -> list[dict[str, Any]]:
        assert self.ended.wait(60)
        outputs = [response.outputs for response in self.responses]
        assert all(output.name == "TEXT_OUTPUT" for (output,) in outputs)
        return [json.loads(output.as_numpy()[0]) for (output,) in outputs]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A TritonPythonModel with kestrel-tiny on the CPU."""
    utilities: Any = types.ModuleType("triton_python_backend_utils")
    utilities.Tensor, utilities.TritonError, utilities.InferenceResponse = Tensor, Error, Response
    utilities.TRITONSERVER_RESPONSE_COMPLETE_FINAL = FINAL
    utilities.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
    spec = importlib.util.spec_from_file_location("triton_model", FOLDER / "1/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton_python_backend_utils", utilities)
        patch.setenv("KESTREL_DEVICE", "cpu")
        spec.loader.exec_module(module)
        made = module.TritonPythonModel()
        made.initialize({})
        yield made
        made.finalize()


def ask(served: Any, **inputs: Any) -> Request:
    image = (ROOT / "clients/python/kestrel_client/commands/demo.jpg").read_bytes()
    request = Request(IMAGE=image, TEMPERATURE=0.0, **inputs)
    served.execute([request])
    return request


def test_answers(served):
    query = ask(served, SKILL=b"query", QUESTION=b"How many green crescents are there?")
    detect = ask(served, SKILL=b"detect", OBJECT=b"green crescent")
    caption = ask(served, SKILL=b"caption", LENGTH=b"normal", STREAM=True)
    (answer,) = query.values()
    assert answer["answer"] == "2" and answer["request_id"] == "seven"
    (found,) = detect.values()
    assert len(found["objects"]) == 2
    *pieces, final = caption.values()
    assert len(pieces) > 3 and "".join(each["chunk"] for each in pieces) == final["caption"]


def test_errors_name_the_input(served):
    request = ask(served, SKILL=b"query", QUESTION=b"Why?", MAX_TOKENS=0)
    assert request.ended.wait(60)
    (response,) = request.responses
    assert response.error.message.startswith("INVALID_ARGUMENT: MAX_TOKENS: must be in [1, ")


def test_a_cancelled_request_ends(served):
    request = ask(served, SKILL=b"caption", LENGTH=b"long", STREAM=True)
    request.cancelled = True
    assert request.ended.wait(60)
    (answer,) = ask(served, SKILL=b"query", QUESTION=b"How many?", MAX_TOKENS=2).values()
    assert answer["answer"]


def test_the_configuration_is_that_of_the_model():
    """config.pbtxt, without what only a real Triton server needs."""
    text = (
        (FOLDER / "config.pbtxt")
        .read_text()
        .replace("instance_group [ { kind: KIND_MODEL count: 1 } ]", "")
    )
    written = text_format.Parse(text, pb.ModelConfig())
    ours = model.config(model.NAME)
    assert written.backend == "python" and written.max_batch_size == 0
    assert list(written.input) == list(ours.input) and list(written.output) == list(ours.output)
    assert written.model_transaction_policy == ours.model_transaction_policy
