"""The model as Triton's clients see it: its name, version, inputs and output."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_engine import InvalidRequest, ModelNotFoundError

from ..served_model import ServedModel, ServedModels
from .tensors import BYTES

NAME, VERSION = "moondream", "1"
"""The name in the vendor's model repository. The name of a served model is accepted too."""
OUTPUT = "TEXT_OUTPUT"
_PLATFORM = "kestrel"
_FLOATS = ("FP32", "FP64", "FP16")
_WHOLE = ("INT32", "INT64", "UINT32", "UINT64", "INT16", "UINT16", "INT8", "UINT8")
_TYPES = {BYTES: pb.TYPE_STRING, "BOOL": pb.TYPE_BOOL, "INT32": pb.TYPE_INT32, "FP32": pb.TYPE_FP32}


@dataclass(frozen=True, slots=True)
class Input:
    """``datatypes``: the accepted ones. The metadata shows the first."""

    name: str
    datatypes: tuple[str, ...]
    is_optional: bool = True


INPUTS = {
    each.name: each
    for each in (
        Input("SKILL", (BYTES,), is_optional=False),
        Input("QUESTION", (BYTES,)),
        Input("OBJECT", (BYTES,)),
        Input("IMAGE", (BYTES, "UINT8")),
        Input("MAX_CROPS", _WHOLE),
        Input("LENGTH", (BYTES,)),
        Input("TEMPERATURE", _FLOATS),
        Input("TOP_P", _FLOATS),
        Input("MAX_TOKENS", _WHOLE),
        Input("MAX_REASONING_TOKENS", _WHOLE),
        Input("MAX_OBJECTS", _WHOLE),
        Input("REASONING", ("BOOL",)),
        Input("SYSTEM", (BYTES,)),
        Input("PRESUPPOSES", (BYTES,)),
        Input("MAX_ABSENCE", _FLOATS),
        Input("STREAM", ("BOOL",)),
        Input("SPATIAL_REFS", (BYTES,)),
        Input("THRESHOLD", _FLOATS),
        Input("REFINE", ("BOOL",)),
        Input("ACCURATE", ("BOOL",)),
        Input("ADAPTER", (BYTES,)),
    )
}


def model_of(served: ServedModels, name: str, version: str, prefix: str = "") -> ServedModel:
    """The model that a request names. ``prefix``: of the fields "name" and "version". Raises ModelNotFoundError,
    InvalidRequest."""
    if not name:
        raise InvalidRequest(f"{prefix}name", f"is required: {NAME!r}")
    found = served.default if name == NAME else served.model(name, f"{prefix}name")
    if version not in ("", VERSION):
        shown = version[:20]
        raise ModelNotFoundError(
            f"{prefix}version", f"{shown!r} is not served; the only version is {VERSION}"
        )
    return found


def metadata(name: str) -> pb.ModelMetadataResponse:
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=name,
        versions=[VERSION],
        platform=_PLATFORM,
        inputs=[
            tensor(name=each.name, datatype=each.datatypes[0], shape=[1])
            for each in INPUTS.values()
        ],
        outputs=[tensor(name=OUTPUT, datatype=BYTES, shape=[1])],
    )


def config(name: str) -> pb.ModelConfig:
    """``max_batch_size`` is 0: the engine makes its batches itself, and a request has no dimension for them."""
    return pb.ModelConfig(
        name=name,
        platform=_PLATFORM,
        backend=_PLATFORM,
        max_batch_size=0,
        input=[
            pb.ModelInput(
                name=each.name,
                data_type=_TYPES[each.datatypes[0]],
                dims=[1],
                optional=each.is_optional,
            )
            for each in INPUTS.values()
        ],
        output=[pb.ModelOutput(name=OUTPUT, data_type=pb.TYPE_STRING, dims=[1])],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
