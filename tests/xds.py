"""The messages of xDS and Envoy, from the package xds-protos.

The package is read, not installed: it overwrites modules of googleapis-common-protos and OpenTelemetry.
"""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2


def download(folder: Path) -> zipfile.ZipFile:
    """The package. Skips where there is no index."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
    done = subprocess.run([*pip, "xds-protos>=1.80"], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip("no package index is reachable")
    (found,) = folder.glob("xds_protos-*.whl")
    return zipfile.ZipFile(found)


def file_of(wheel: zipfile.ZipFile, proto: str) -> descriptor_pb2.FileDescriptorProto:
    """The descriptor of a .proto file. Raises KeyError if the package has none."""
    module = wheel.read(proto.removesuffix(".proto").replace("-", "_") + "_pb2.py").decode()
    found = re.search(r"AddSerializedFile\((b'.*?')\)\n", module, re.DOTALL)
    assert found is not None
    return descriptor_pb2.FileDescriptorProto.FromString(ast.literal_eval(found[1]))
