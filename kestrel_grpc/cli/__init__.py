"""The command line, with one module per command. A command imports only what it needs; only serving imports torch."""

import os

# This must be set before grpc is imported. gRPC's core writes its own lines to standard error, and some of them hold
# bytes that a peer sent, including line breaks. An operator can set GRPC_VERBOSITY to see these lines.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# This must be set before torch is imported. At the start on a GPU, torch would warn of experimental settings that we
# use on purpose. Errors are still shown.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# This must be set before tokenizers is used. It encodes one text at a time here, and would start a thread for each
# processor.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
