"""Capture: writes requests that fail by the server's fault to files, so that they can be replayed.

--capture-dir allows captures. AdminService starts one, which ends after a number of requests. A file holds the request
with its texts. It holds the image only if both the operator (--capture-images) and the administrator allow that. It
never holds the caller's name or cache_salt. A file is written completely or not at all, and only its owner can read
it. If the disk is full, the file is lost; the call is not affected.

A request by HTTP or KServe's protocol is captured as the message of kestrel.v1 that it became, with its method.
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
from copy import copy
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, vision_service_pb2
from kestrel_client.images.request_images import request_images
from kestrel_engine import EngineInfo, clock

from .. import __version__
from ..edge.calls.call import Call
from ..edge.failures.errors import CaptureError
from ..edge.messages.fields import request_options
from ..images.request_images import PIXEL_FORMATS
from ..images.upload import ReceivedParts
from ..served_model import ServedModels
from ..service_names import IMAGE_METHODS, KSERVE_METHODS, VISION_METHODS
from ..settings.debug import DebugConfig

logger = logging.getLogger(__name__)

FORMAT = 1
SUFFIX = ".capture.json"
DEFAULT_REQUESTS, MAX_REQUESTS = 10, 100
_CAPTURED_STATUSES = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)
"""Statuses that are captured. UNAVAILABLE is not, because the request did not start or the whole server ended."""
_CAPTURED_METHODS = (VISION_METHODS, IMAGE_METHODS, KSERVE_METHODS)
_METHODS_OF_VISION = {
    (method.input_type.full_name, method.server_streaming): f"{VISION_METHODS}{method.name}"
    for method in vision_service_pb2.DESCRIPTOR.services_by_name["VisionService"].methods
}
"""By the name of the request message, and whether the answer is a stream."""
_MOST_WAITING = 4
"""Number of requests that may wait to be written. Each holds its message in memory."""


class Capture:
    """Captures failing calls. The server passes every finished call to ``on_call``.

    Runs on the event loop; a thread writes the files.
    """

    def __init__(self, config: DebugConfig, served: ServedModels) -> None:
        self._config, self._served = config, served
        self._folder = None if config.capture_dir is None else Path(config.capture_dir)
        self._left = 0
        self._with_images = False
        self._files: list[str] = []
        self._lost = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._one_by_one = asyncio.Lock()

    def start(self, requests: int, *, images: bool) -> None:
        """Captures the next ``requests`` failing requests, with their images if ``images``. Raises CaptureError."""
        if self._folder is None:
            raise CaptureError("the server was started without --capture-dir")
        if images and not self._config.capture_images:
            raise CaptureError("the server was started without --capture-images")
        self._left, self._with_images = requests, images
        self._files, self._lost = [], 0

    async def stop(self) -> tuple[list[str], int]:
        """Stops capturing. Returns the names of the files since ``start``, and the number of requests not written."""
        self._left = 0
        if self._writing:
            await asyncio.wait(self._writing)
        return self._files, self._lost

    def on_call(self, call: Call) -> None:
        if not self._left or call.code not in _CAPTURED_STATUSES:
            return
        if not call.method.startswith(_CAPTURED_METHODS) or _method_of(call) is None:
            return
        self._left -= 1
        if len(self._writing) >= _MOST_WAITING:
            self._lost += 1
            return
        engine = self._served.default.loaded
        facts = _facts(call, None if engine is None else engine.info)
        kept = copy(call)  # The call itself releases its request now.
        task = asyncio.create_task(self._write(kept, facts, self._with_images))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, call: Call, facts: dict[str, Any], with_image: bool) -> None:
        async with self._one_by_one:
            try:
                name = await asyncio.to_thread(self._write_file, call, facts, with_image)
            except Exception as error:  # No caller awaits this task, so the error is logged here.
                self._lost += 1
                logger.error("request %s could not be captured: %s", call.request_id, error)
                return
        self._files.append(name)
        logger.warning("captured request %s in %s", call.request_id, name)

    def _write_file(self, call: Call, facts: dict[str, Any], with_image: bool) -> str:
        """Writes the file and returns its name. Raises OSError, also if the folder's limits are reached."""
        assert self._folder is not None
        request, left_out = _described(call, with_image)
        contents = {"kestrel_capture": FORMAT, **facts}
        contents |= {"images_left_out": left_out, "request": request}
        data = json.dumps(contents, ensure_ascii=False, indent=1).encode()
        sizes = [path.stat().st_size for path in self._folder.glob(f"*{SUFFIX}")]
        if len(sizes) >= self._config.capture_max_files:
            raise OSError("the folder has reached its limit on files; delete some")
        if sum(sizes) + len(data) > self._config.capture_max_bytes:
            raise OSError("the folder has reached its limit on bytes; delete some")
        now = datetime.fromtimestamp(clock.wall(), UTC).strftime("%Y%m%dT%H%M%SZ")
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


def _described(call: Call, with_image: bool) -> tuple[Any, list[dict[str, Any]]]:
    """The request in protobuf's JSON form, with the field names of the .proto files, and the facts about its images
    that are left out, whose fields stay, empty. The messages of an upload and of a stream of frames are a list."""
    if isinstance(call.message, ReceivedParts):
        return _described_upload(call.message, with_image)
    request = _without_salt(call.message)
    left_out: list[dict[str, Any]] = []
    for image in request_images(request):
        source = image.WhichOneof("source")
        if source == "image_id" and image.image_id in call.stored:
            _inline(image, call.stored[image.image_id])
        if not with_image or image.WhichOneof("source") == "image_id":
            left_out.append({**_image_facts(image), "source": source})
            for name in ("encoded", "raw", "image_id", "features"):
                image.ClearField(name)
    if call.opening is None:
        return _plain(request), left_out
    return [_plain(_without_salt(call.opening)), _plain(request)], left_out


def _without_salt(message: Any) -> Any:
    """A copy of a request without the cache_salt of its options."""
    copied = type(message)()
    copied.CopyFrom(message)
    if (options := request_options(copied)) is not None:
        options.ClearField("cache_salt")
    return copied


def _described_upload(
    received: ReceivedParts, with_image: bool
) -> tuple[Any, list[dict[str, Any]]]:
    """The messages of an upload, with all chunks in one message, and the facts about the image if it is left out."""
    data = b"".join(received.chunks)
    sent = [image_service_pb2.UploadImageRequest(info=received.info)] if received.info else []
    if with_image:
        sent.append(image_service_pb2.UploadImageRequest(chunk=data))
    left_out = [] if with_image else [{"source": "upload", **_data_facts(data)}]
    return [_plain(message) for message in sent], left_out


def _plain(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _facts(call: Call, info: EngineInfo | None) -> dict[str, Any]:
    """The facts about a call that do not depend on the request's contents."""
    error = call.error
    return {
        "time": datetime.fromtimestamp(clock.wall(), UTC).isoformat(timespec="milliseconds"),
        "version": __version__,
        "model": None if info is None else info.model,
        "weights": None if info is None else info.weights_fingerprint,
        "device": None if info is None else info.device_name or info.device,
        "method": (_method_of(call) or call.method).removeprefix("/"),
        "request_id": call.request_id,
        "code": call.code.name,
        "after_ms": round(call.duration_ms, 1),
        "error": None if error is None else type(error).__name__,
        "traceback": None if error is None else traceback.format_exception(error),
    }


def _method_of(call: Call) -> str | None:
    """The method that takes the call's message; None if there is no message, or none that a file can hold: a request of
    KServe's protocol that could not be converted, or several prompts of one request by HTTP."""
    message = call.message
    if isinstance(message, ReceivedParts):
        return call.method
    if not isinstance(message, Message):
        return None
    own = None if call.method.startswith(KSERVE_METHODS) else call.method
    return _METHODS_OF_VISION.get((message.DESCRIPTOR.full_name, call.streams), own)


def _image_facts(image: common_pb2.Image) -> dict[str, Any]:
    source = image.WhichOneof("source") or ""
    data = {
        "encoded": image.encoded, "raw": image.raw.data, "features": image.features.data
    }.get(source)  # fmt: skip
    return {"source": source, **(_data_facts(data) if data is not None else {})}


def _data_facts(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _inline(image: common_pb2.Image, source: bytes | np.ndarray) -> None:
    if isinstance(source, bytes):
        image.encoded = source
        return
    raw = image.raw
    raw.height, raw.width, depth = source.shape
    raw.data, raw.format = np.ascontiguousarray(source).tobytes(), PIXEL_FORMATS[depth]
