"""The command line, with one module per command. A command imports only what it needs; only serving imports torch."""

import os

import kestrel_client.commands  # noqa: F401  It decides what gRPC logs, before grpc is imported.

# This must be set before torch is imported. At the start on a GPU, torch would warn of experimental settings that we
# use on purpose. Errors are still shown.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# This must be set before tokenizers is used. It encodes one text at a time here, and would start a thread for each
# processor.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
