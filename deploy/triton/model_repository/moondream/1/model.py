"""The model `moondream` of a Triton server: Kestrel's engine behind Triton's Python back end.

Environment: KESTREL_MODEL (a name, default moondream3-preview) or KESTREL_WEIGHTS (weights), KESTREL_TOKENIZER_PATH,
KESTREL_DEVICE (default cuda), KESTREL_MAX_BATCH_SIZE (default: what the device has room for).
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_engine import RuntimeConfig
from kestrel_grpc.kserve.embedded import EmbeddedModel
from kestrel_grpc.kserve.model import INPUTS, NAME, OUTPUT
from kestrel_grpc.kserve.service import FINAL
from kestrel_grpc.kserve.tensors import raw_bytes

_CANCEL_POLL_S = 0.1
_DATATYPES = {"float32": "FP32", "int32": "INT32", "bool": "BOOL"}


def _config() -> RuntimeConfig:
    given = {
        "model": os.environ.get("KESTREL_MODEL", "moondream3-preview"),
        "device": os.environ.get("KESTREL_DEVICE", "cuda"),
    }
    if path := os.environ.get("KESTREL_WEIGHTS"):
        del given["model"]
        given["model_path"] = path
    if path := os.environ.get("KESTREL_TOKENIZER_PATH"):
        given["tokenizer_path"] = path
    if size := os.environ.get("KESTREL_MAX_BATCH_SIZE"):
        return RuntimeConfig(**given, max_batch_size=int(size))
    return RuntimeConfig(**given)


class TritonPythonModel:
    """The engine and its requests run on an event loop in a thread. Triton calls the methods from other threads."""

    def initialize(self, args: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kestrel", daemon=True)
        self._thread.start()
        self._model = self._run(EmbeddedModel.create(_config()))

    def execute(self, requests: list[Any]) -> None:
        """Starts the requests and returns at once: responses go through each request's sender."""
        for request in requests:
            asyncio.run_coroutine_threadsafe(self._answer(request), self._loop)

    def finalize(self) -> None:
        self._run(self._model.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()

        async def write(answer: pb.ModelStreamInferResponse) -> None:
            is_final = answer.infer_response.parameters[FINAL].bool_param
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
            sender.send(_response(answer), flags=flags)

        try:
            message = _message(request)
        except Exception as error:
            failed = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
            sender.send(failed, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        answering = asyncio.create_task(self._model.answer(message, write))
        while not answering.done():
            await asyncio.wait({answering}, timeout=_CANCEL_POLL_S)
            if request.is_cancelled():
                answering.cancel()
                await asyncio.wait({answering})
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                return


def _message(request: Any) -> pb.ModelInferRequest:
    """Triton's request as the protocol's message."""
    message = pb.ModelInferRequest(model_name=NAME, id=request.request_id())
    for name in INPUTS:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        if tensor is None:
            continue
        values = tensor.as_numpy()
        datatype = _DATATYPES.get(values.dtype.name, "BYTES")
        message.inputs.add(name=name, datatype=datatype, shape=values.shape)
        raw = raw_bytes(values.reshape(-1).tolist()) if datatype == "BYTES" else values.tobytes()
        message.raw_input_contents.append(raw)
    return message


def _response(answer: pb.ModelStreamInferResponse) -> Any:
    if answer.error_message:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(answer.error_message))
    (raw,) = answer.infer_response.raw_output_contents
    output = pb_utils.Tensor(OUTPUT, np.array([raw[4:]], dtype=np.object_))
    return pb_utils.InferenceResponse(output_tensors=[output])
