"""GRPCInferenceService: the Open Inference Protocol, version 2, with Triton's extensions.

What makes no sense for one model that is loaded once, without shared memory, answers UNIMPLEMENTED with the reason.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, cast

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_client._pb.inference.grpc_service_pb2_grpc import GRPCInferenceServiceServicer
from kestrel_engine import InvalidRequest

from .. import __version__
from ..edge.calls.call import Call, Context, Metadata
from ..edge.calls.current import current
from ..edge.failures.errors import NotServed
from ..edge.failures.statuses import Complaint
from ..edge.messages.fields import located, take_options
from ..monitoring.call_statistics import CallStatistics
from ..served_model import ServedModels, State
from ..services.vision import VisionService
from . import model
from .skills import Values, VisionCall, input_path, output_values, vision_call
from .tensors import BYTES, raw_bytes

SERVER_NAME = "kestrel"
EXTENSIONS = "binary_tensor_data model_configuration model_repository parameters statistics".split()
FINAL = "triton_final_response"
"""The parameter that marks the last response of a request."""
_REAL_STATUS = ("triton_grpc_error", "true")
"""The metadata with which a client requests that an error ends its stream with a status."""
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_NO_LOADING = "this server has one model, which it loads when it starts"
_NO_SHARED_MEMORY = "this server shares no memory with its clients; send tensors in the request"
_STATES = {
    State.READY: ("READY", ""),
    State.LOADING: ("LOADING", "the model is loading"),
    State.FAILED: ("UNAVAILABLE", "the model has failed; restart the server"),
    State.DRAINING: ("UNAVAILABLE", "the server is shutting down"),
}


def _refused(reason: str) -> Any:
    """A method that this server does not answer."""

    async def refuse(self: InferenceService, request: Any, context: Context) -> NoReturn:
        raise NotServed(reason)

    return refuse


class InferenceService(GRPCInferenceServiceServicer):
    """Holds no state."""

    RepositoryModelLoad = RepositoryModelUnload = _refused(_NO_LOADING)
    SystemSharedMemoryStatus = CudaSharedMemoryStatus = _refused(_NO_SHARED_MEMORY)
    SystemSharedMemoryRegister = CudaSharedMemoryRegister = _refused(_NO_SHARED_MEMORY)
    SystemSharedMemoryUnregister = CudaSharedMemoryUnregister = _refused(_NO_SHARED_MEMORY)
    TraceSetting = _refused(
        "traces are configured when the server starts; see docs/run/telemetry.md"
    )
    LogSettings = _refused("log levels are set with kestrel.v1.AdminService/SetLogLevel")

    def __init__(self, served: ServedModels, vision: VisionService, calls: CallStatistics) -> None:
        self._served, self._vision, self._calls = served, vision, calls

    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._served.state is State.READY)

    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        state = model.model_of(self._served, request.name, request.version).state
        return pb.ModelReadyResponse(ready=state is State.READY)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(
            name=SERVER_NAME, version=__version__, extensions=EXTENSIONS
        )

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        model.model_of(self._served, request.name, request.version)
        return model.metadata(request.name)

    async def ModelConfig(
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        model.model_of(self._served, request.name, request.version)
        return pb.ModelConfigResponse(config=model.config(request.name))

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        if request.name:  # Without a name: all models.
            model.model_of(self._served, request.name, request.version)
        return pb.ModelStatisticsResponse(model_stats=[_statistics(self._calls)])

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        default = self._served.default
        named = [(model.NAME, default)]
        named += [(each.name, each) for each in self._served if each is not default]
        shown = []
        for name, each in named:
            state, reason = _STATES[each.state]
            if state == "READY" or not request.ready:
                shown.append(
                    pb.RepositoryIndexResponse.ModelIndex(
                        name=name, version=model.VERSION, state=state, reason=reason
                    )
                )
        return pb.RepositoryIndexResponse(models=shown)

    async def ModelInfer(
        self, request: pb.ModelInferRequest, context: Context
    ) -> pb.ModelInferResponse:
        wanted = self._call(request)
        if wanted.streams:
            raise InvalidRequest("STREAM", "ModelInfer has one response; use ModelStreamInfer")
        with located(input_path):
            response = await wanted.behaviour(wanted.message, context)
        return _response(request, output_values(response))

    async def ModelStreamInfer(  # type: ignore[override]
        self, request: pb.ModelInferRequest, context: Context
    ) -> None:
        """Answers one request of the stream. edge/request_streams.py divides the stream."""
        wanted = self._call(request)
        with located(input_path):
            if wanted.streams:
                pieces = cast(Context, _Pieces(request, wanted, context))
                await wanted.behaviour(wanted.message, pieces)
                return
            response = await wanted.behaviour(wanted.message, context)
        await context.write(_stream_response(request, output_values(response), is_final=True))

    def _call(self, request: pb.ModelInferRequest) -> VisionCall:
        """Raises InvalidRequest, ModelNotFoundError."""
        named = (request.model_name, request.model_version)
        served = model.model_of(self._served, *named, prefix="model_")
        call = current.get()
        _apply_parameters(request, call)
        _check_outputs(request)
        wanted = vision_call(request, self._vision)
        if served is not self._served.default:
            wanted.message.options.model = served.name
        call.message, call.streams = wanted.message, wanted.streams
        with located(input_path):
            take_options(call)
        return wanted


def refuse(
    request: pb.ModelInferRequest, complaint: Complaint, metadata: Metadata
) -> pb.ModelStreamInferResponse | None:
    """Returns the answer to a failed request of a stream; None if the error must end the stream."""
    if _REAL_STATUS in metadata:
        return None
    response = pb.ModelInferResponse(
        id=request.id, model_name=request.model_name, model_version=request.model_version
    )
    response.parameters[FINAL].bool_param = True
    return pb.ModelStreamInferResponse(
        error_message=f"{complaint.code.name}: {complaint.message}", infer_response=response
    )


class _Pieces:
    """The context of a stream's method. It converts the messages to responses of ``request``."""

    def __init__(self, request: pb.ModelInferRequest, wanted: VisionCall, context: Context) -> None:
        self._request, self._wanted, self._context = request, wanted, context

    async def write(self, message: Any) -> None:
        values = self._wanted.piece(message)
        if values is not None:
            is_final = bool(values["completed"])
            await self._context.write(_stream_response(self._request, values, is_final=is_final))


def _stream_response(
    request: pb.ModelInferRequest, values: Values, *, is_final: bool
) -> pb.ModelStreamInferResponse:
    """The last response has data and is marked as final, so no empty response follows, even if a client asks."""
    response = _response(request, values)
    response.parameters[FINAL].bool_param = is_final
    return pb.ModelStreamInferResponse(infer_response=response)


def _response(request: pb.ModelInferRequest, values: Values) -> pb.ModelInferResponse:
    text = json.dumps(values, ensure_ascii=False).encode()
    output = pb.ModelInferResponse.InferOutputTensor(name=model.OUTPUT, datatype=BYTES, shape=[1])
    return pb.ModelInferResponse(
        model_name=request.model_name,
        model_version=model.VERSION,
        id=request.id,
        outputs=[output],
        raw_output_contents=[raw_bytes([text])],
    )


def _apply_parameters(request: pb.ModelInferRequest, call: Call) -> None:
    """``timeout``: microseconds for the whole request. Others have no effect, except sequences, which are refused."""
    parameters = request.parameters
    for name in _SEQUENCES:
        if name in parameters:
            raise InvalidRequest(("parameters", name), "the model has no sequences")
    if "timeout" in parameters:
        timeout = parameters["timeout"]
        timeout_us = timeout.int64_param or timeout.uint64_param
        if timeout_us < 1:
            raise InvalidRequest(
                ("parameters", "timeout"), "must be at least 1 microsecond, as int64"
            )
        wanted_s = timeout_us / 1e6
        call.longest_s = wanted_s if call.longest_s is None else min(call.longest_s, wanted_s)


def _check_outputs(request: pb.ModelInferRequest) -> None:
    for output in request.outputs:
        if output.name != model.OUTPUT:
            shown = output.name[:40]
            raise InvalidRequest("outputs", f"{shown!r} is not {model.OUTPUT}, the only output")
        for name in ("classification", "shared_memory_region"):
            if name in output.parameters:
                raise InvalidRequest(("outputs", model.OUTPUT), f"{name} is not served")


def _statistics(calls: CallStatistics) -> pb.ModelStatistics:
    """Each request counts as one inference and one execution, because a batch changes at every step of the engine."""
    counts = calls.methods.values()
    ok = sum(each.ok for each in counts)

    def spent(seconds: float, count: int = ok) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=count, ns=round(1e9 * seconds))

    return pb.ModelStatistics(
        name=model.NAME,
        version=model.VERSION,
        last_inference=0 if calls.last_at is None else round(1e3 * calls.last_at),
        inference_count=ok,
        execution_count=ok,
        inference_stats=pb.InferStatistics(
            success=spent(sum(each.total_s for each in counts)),
            fail=spent(
                sum(each.failed_s for each in counts),
                sum(each.failed + each.cancelled + each.refused for each in counts),
            ),
            queue=spent(sum(each.queue_s for each in counts)),
            compute_input=spent(sum(each.preprocess_s for each in counts)),
            compute_infer=spent(sum(each.prefill_s + each.decode_s for each in counts)),
            compute_output=spent(0.0),
        ),
    )
