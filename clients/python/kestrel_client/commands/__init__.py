"""The commands of ``kestrel``, which need a server and no more than the SDK. A command imports only what it needs."""

import os
from pathlib import Path

# This must be set before grpc is imported. gRPC's core writes its own lines to standard error, and some of them hold
# bytes that a peer sent, including line breaks. A user can set GRPC_VERBOSITY to see these lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

DEMO_IMAGE = Path(__file__).with_name("demo.jpg")
"""Coloured shapes, for demonstrations and load tests."""
