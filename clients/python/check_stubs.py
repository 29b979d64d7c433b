#!/usr/bin/env python3
"""Checks that the client loads and talks with the oldest and the newest protobuf and grpcio that it allows.

Run with any Python 3.11 or newer (`make check-stubs`). Builds a throw-away virtual environment for each pair, so it
needs the package index; takes about half a minute. Exits with 1 if a pair fails.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CLIENT = Path(__file__).resolve().parent
ENVIRONMENTS = {
    "oldest": ("protobuf==6.33.5", "grpcio==1.81.1", "googleapis-common-protos==1.70"),
    "protobuf 6, new grpcio": ("protobuf<7", "grpcio<2", "googleapis-common-protos<2"),
    "newest": ("protobuf>=7,<8", "grpcio<2", "googleapis-common-protos<2"),
}

PROGRAM = """
import sys
from concurrent import futures
import google.protobuf, grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from kestrel_client import DetectedBox, FieldViolation, InvalidArgumentError, KestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2, vision_service_pb2_grpc
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

class Vision(vision_service_pb2_grpc.VisionServiceServicer):
    def Detect(self, request, context):
        (name,) = request.detect.objects
        if name == "bad":
            violations = [{"field": "detect.objects[0]", "description": "is bad"}]
            detail = any_pb2.Any()
            detail.Pack(error_details_pb2.BadRequest(field_violations=violations))
            status = status_pb2.Status(code=3, details=[detail])
            context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "bad")
        box = common_pb2.Box(x_min=0.25, y_min=0.5, x_max=0.75, y_max=1)
        info = common_pb2.RequestInfo(seed=2**63 - 1)
        return pb.DetectResponse(
            detections=[pb.Detection(label=name, score=0.5, box=box)], info=info
        )

    def StreamDetect(self, request, context):
        final = self.Detect(request, context)
        yield pb.StreamDetectResponse(detection=final.detections[0])
        yield pb.StreamDetectResponse(sequence=1, final=final)

server = grpc.server(futures.ThreadPoolExecutor(2))
vision_service_pb2_grpc.add_VisionServiceServicer_to_server(Vision(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with KestrelClient(f"127.0.0.1:{port}", timeout=10) as client:
    result = client.detect(b"x", "circle", temperature=0.5)
    assert result.objects == (DetectedBox(0.25, 0.5, 0.75, 1, "circle", 0.5),)
    assert result.seed == 2**63 - 1
    with client.stream_detect(b"x", "circle") as stream:
        assert list(stream) == list(result.objects) and stream.result() == result
    try:
        client.detect(b"x", "bad")
    except InvalidArgumentError as error:
        assert error.field_violations == (FieldViolation("detect.objects[0]", "is bad"),)
    else:
        raise AssertionError("not refused")
server.stop(None).wait()
assert not {"kestrel", "buf"} & set(sys.modules)
print("protobuf", google.protobuf.__version__, "grpcio", grpc.__version__)
"""


def main() -> int:
    failed = False
    for name, requirements in ENVIRONMENTS.items():
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder) / (
                "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
            )
            subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
            run = subprocess.run(
                [python, "-W", "error", "-c", PROGRAM], cwd=CLIENT, capture_output=True, text=True
            )
        failed |= run.returncode != 0
        print(f"{name}: {'FAILED' if run.returncode else 'ok'}, {run.stdout.strip()}{run.stderr}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
