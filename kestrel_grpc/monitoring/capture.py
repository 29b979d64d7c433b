"""Capture: requests that fail by the server's fault, written down to be done again. Owns the files and their bounds.

Allowed by --capture-dir, begun by AdminService, over after so many. A file holds what was asked, texts included;
pictures only where the operator and the administrator both say so; never who asked, and no cache_salt. Made whole or
not at all, readable by its owner only; a full disk costs the file, not the call.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import secrets
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_engine import EngineInfo

from .. import __version__
from ..edge.call import Call
from ..edge.errors import CaptureError
from ..images.upload import Taken
from ..served_model import ServedModel
from ..settings.debug import DebugConfig

logger = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".capture.json"
DEFAULT_REQUESTS, MAX_REQUESTS = 10, 100
FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""Statuses that are captured. UNAVAILABLE is not: the request was not begun, or the whole server ended."""
_SERVICES = ("/kestrel.v1.VisionService/", "/kestrel.v1.ImageService/")
_FORMATS = {
    1: common_pb2.PIXEL_FORMAT_GRAY8,
    3: common_pb2.PIXEL_FORMAT_RGB8,
    4: common_pb2.PIXEL_FORMAT_RGBA8,
}
"""By the bytes of a pixel."""
_MOST_WAITING = 4
"""Requests that may wait to be written: each holds its message."""


@dataclass(frozen=True, slots=True, eq=False)
class _Failed:
    """What is to be written of a call, which itself is over by then; nobody else uses the message any more."""

    message: Any
    """Its request, or what came of an upload."""
    facts: dict[str, Any]
    stored: bytes | np.ndarray | None
    """The picture that it names by id, if that was found."""
    pictures: bool
    request_id: str


class Capture:
    """``on_call`` is told of every call that ended; all but the writing happens on the event loop."""

    def __init__(self, config: DebugConfig, served: ServedModel) -> None:
        self._config, self._served = config, served
        self._folder = None if config.capture_dir is None else Path(config.capture_dir)
        self._left = 0
        self._pictures = False
        self._files: list[str] = []
        self._lost = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._one_by_one = asyncio.Lock()

    def start(self, requests: int, *, pictures: bool) -> None:
        """Captures the next ``requests`` that fail. Raises CaptureError."""
        if self._folder is None:
            raise CaptureError("the server was started without --capture-dir")
        if pictures and not self._config.capture_pictures:
            raise CaptureError("the server was started without --capture-pictures")
        self._left, self._pictures = requests, pictures
        self._files, self._lost = [], 0

    async def stop(self) -> tuple[list[str], int]:
        """Names of the files since the start, and how many requests could not be written."""
        self._left = 0
        if self._writing:
            await asyncio.wait(self._writing)
        return self._files, self._lost

    def on_call(self, call: Call) -> None:
        if not self._left or call.code not in FAULTS or call.message is None:
            return
        if not call.method.startswith(_SERVICES):
            return
        self._left -= 1
        if len(self._writing) >= _MOST_WAITING:
            self._lost += 1
            return
        engine = self._served.loaded
        facts = _facts(call, None if engine is None else engine.info)
        failed = _Failed(call.message, facts, call.stored, self._pictures, call.request_id)
        task = asyncio.create_task(self._write(failed))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, failed: _Failed) -> None:
        async with self._one_by_one:
            try:
                name = await asyncio.to_thread(self._write_file, failed)
            except Exception as error:  # The capture's edge: nobody waits for it.
                self._lost += 1
                logger.error("request %s is not captured: %s", failed.request_id, error)
                return
        self._files.append(name)
        logger.warning("request %s is captured in %s", failed.request_id, name)

    def _write_file(self, failed: _Failed) -> str:
        """Raises OSError where there is no room."""
        assert self._folder is not None
        data = json.dumps(described(failed), ensure_ascii=False, indent=1).encode()
        sizes = [path.stat().st_size for path in self._folder.glob(f"*{SUFFIX}")]
        if len(sizes) >= self._config.capture_max_files:
            raise OSError("the folder holds as many files as it may (--capture-max-files)")
        if sum(sizes) + len(data) > self._config.capture_max_bytes:
            raise OSError("the folder holds as many bytes as it may (--capture-max-bytes)")
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = self._folder / f"kestrel-{now}-{secrets.token_hex(3)}{SUFFIX}"
        part = path.with_suffix(".part")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            part.rename(path)
        finally:
            with suppress(OSError):
                part.unlink()
        return path.name


def described(failed: _Failed) -> dict[str, Any]:
    """The file's contents. The request has protobuf's own JSON form, with the fields' names as in the .proto files; a
    stream of them is a list."""
    if isinstance(failed.message, Taken):
        request, left_out = _uploaded(failed.message, failed.pictures)
    else:
        request, left_out = _asked(failed)
    return {
        "kestrel_capture": FORMAT,
        **failed.facts,
        "picture_left_out": left_out,
        "request": request,
    }


def _asked(failed: _Failed) -> tuple[Any, dict[str, Any] | None]:
    """The request, and what is known of its picture if that is left out."""
    request = type(failed.message)()
    request.CopyFrom(failed.message)
    image, inner = _image(request), getattr(request, "request", request)
    if hasattr(inner, "options"):
        inner.options.ClearField("cache_salt")
    left_out = None
    if image is not None:
        source = image.WhichOneof("source")
        if source == "image_id" and failed.stored is not None:
            _inline(image, failed.stored)
        if not failed.pictures or image.WhichOneof("source") == "image_id":
            left_out = {**_picture_facts(image), "source": source}
            inner.ClearField("image")
    return _plain(request), left_out


def _uploaded(taken: Taken, pictures: bool) -> tuple[Any, dict[str, Any] | None]:
    """As ``_asked``, of what came of an upload; its chunks are one."""
    data = b"".join(taken.chunks)
    sent = [image_service_pb2.UploadImageRequest(info=taken.info)] if taken.info else []
    if pictures:
        sent.append(image_service_pb2.UploadImageRequest(chunk=data))
    left_out = None if pictures else {"source": "upload", **_data_facts(data)}
    return [_plain(message) for message in sent], left_out


def _plain(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _facts(call: Call, info: EngineInfo | None) -> dict[str, Any]:
    """What doesn't depend on the request's contents."""
    error = call.error
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "version": __version__,
        "model": None if info is None else info.model,
        "weights": None if info is None else info.weights_fingerprint,
        "device": None if info is None else info.device_name or info.device,
        "method": call.method.removeprefix("/"),
        "request_id": call.request_id,
        "code": call.code.name,
        "after_ms": round(call.duration_ms, 1),
        "error": None if error is None else type(error).__name__,
        "traceback": None if error is None else traceback.format_exception(error),
    }


def _image(message: Any) -> common_pb2.Image | None:
    """The picture of a request, if it has one."""
    inner = getattr(message, "request", message)
    if "image" not in inner.DESCRIPTOR.fields_by_name or not inner.HasField("image"):
        return None
    image: common_pb2.Image = inner.image
    return image


def _picture_facts(image: common_pb2.Image) -> dict[str, Any]:
    source = image.WhichOneof("source") or ""
    data = {"encoded": image.encoded, "raw": image.raw.data}.get(source)
    return {"source": source, **(_data_facts(data) if data is not None else {})}


def _data_facts(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _inline(image: common_pb2.Image, source: bytes | np.ndarray) -> None:
    if isinstance(source, bytes):
        image.encoded = source
        return
    height, width, depth = source.shape
    image.raw.CopyFrom(
        common_pb2.RawImage(
            data=np.ascontiguousarray(source).tobytes(),
            width=width,
            height=height,
            format=_FORMATS[depth],
        )
    )
