"""What importing the client loads, and what it does without Pillow. Each in an interpreter of its own."""

import subprocess
import sys

LIGHT = """
import sys
from kestrel_client import *
heavy = {"numpy", "PIL", "torch", "kestrel_engine", "kestrel_grpc"}
print(sorted(heavy & set(sys.modules)), "grpc" in sys.modules, KestrelClient.__name__)
"""

WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = None
import kestrel_client
from kestrel_client import PointResult, Timings, Usage
result = PointResult(
    points=(), finish_reason="stop", usage=Usage(), timings=Timings(), model="",
    request_id="", image_size=(1, 1), seed=0, source=b"x",
)
try:
    result.draw()
except ImportError as error:
    print(type(error).__name__, error)
"""

BESIDE_THE_ORIGINALS = """
from kestrel_client import KestrelClient
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from google.protobuf import descriptor_pool
pool = descriptor_pool.Default()
print(pool.FindMessageTypeByName("google.rpc.BadRequest").file.name)
print(pool.FindMessageTypeByName("kestrel.v1.QueryRequest").file.name)
"""


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_is_light() -> None:
    assert run(LIGHT) == "[] True KestrelClient"


def test_drawing_without_pillow_says_what_is_missing() -> None:
    told = run(WITHOUT_PILLOW)
    assert (
        told.startswith("MissingDependencyError")
        and "pip install './clients/python[images]'" in told
    )


def test_no_clash_in_the_descriptor_pool() -> None:
    assert run(BESIDE_THE_ORIGINALS).split() == [
        "google/rpc/error_details.proto",
        "kestrel/v1/vision_service.proto",
    ]
