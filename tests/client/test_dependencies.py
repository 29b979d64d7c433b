"""The client's calls with the oldest packages that it allows, and with protobuf 6 beside a newer grpcio."""

from pathlib import Path

import pytest

from tests.code_blocks import ROOT
from tests.environments import printed, python_with

OLD_GRPC = "grpcio==1.81.1 grpcio-status==1.81.1 grpcio-health-checking==1.81.1"
OLDEST = f"{OLD_GRPC} protobuf==6.33.5 googleapis-common-protos==1.70"
# The parts of gRPC that the tests' own server needs load under protobuf 6 in their oldest version.
PROTOBUF_6 = "grpcio grpcio-status==1.81.1 grpcio-health-checking==1.81.1 protobuf<7"


@pytest.mark.slow
@pytest.mark.parametrize("packages", [OLDEST, PROTOBUF_6], ids=["oldest", "protobuf-6"])
def test_calls_work_with_other_versions(tmp_path: Path, packages: str) -> None:
    python = python_with(tmp_path, packages)
    command = [python, "-m", "pytest", "-q", "-n", "0", "tests/client/calls/test_skills.py"]
    printed(*command, cwd=ROOT, PYTHONPATH=str(ROOT / "clients/python"))
    version = "import google.protobuf; print(google.protobuf.__version__)"
    assert printed(python, "-c", version).startswith("6.")
