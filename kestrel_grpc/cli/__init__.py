"""The command line: one module a command. A command loads what it needs and no more: only serving loads torch."""

import os

# Before grpc is loaded: its core writes to standard error by itself, in a form of its own, and some of its lines bear
# what a stranger sent, line breaks included. Whoever wants to read them all the same sets GRPC_VERBOSITY.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
