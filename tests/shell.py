"""What a shell, a CI runner or a container may say to servers and clients, and tests must not hear."""

import os
import tempfile
from collections.abc import MutableMapping

_PREFIXES = (
    *("KESTREL_", "OTEL_", "HF_", "MOONDREAM_", "OPENAI_", "ANTHROPIC_", "OLLAMA_", "RAY_", "GRPC_", "grpc_proxy"),
    *("KUBERNETES_", "NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "JOURNAL_STREAM", "INVOCATION_ID"),
    *("MAKE", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "COLUMNS", "FORCE_COLOR"),
    *("PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONASYNCIODEBUG"),
    *("no_grpc_proxy", "all_proxy", "ALL_PROXY"),
)  # fmt: skip
_KNOBS = (
    *("KESTREL_SOAK_", "KESTREL_FUZZ_", "KESTREL_EQUALITY_", "KESTREL_WORLDS", "KESTREL_COST_"),
    *("KESTREL_BATCH_KILLS", "KESTREL_CRDS", "KESTREL_TEST_", "KESTREL_SOURCES"),
    *("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",),
)
"""What tests themselves read, or what names this machine's authorities."""
FOLDERS = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest makes the folders of tests. A unix socket in one has a path of 103 bytes at most."""
_LONGEST = 20


def forget_the_shell(environ: MutableMapping[str, str]) -> None:
    """Removes settings of other servers. A proxy remains, as pip may need it, but not for this machine: gRPC and HTTP
    clients would ask it for 127.0.0.1."""
    for name in list(environ):
        if name.startswith(_PREFIXES) and not name.startswith(_KNOBS):
            del environ[name]
    for name in ("no_proxy", "NO_PROXY"):
        environ[name] = ",".join(
            filter(None, (environ.get(name), "localhost,127.0.0.1,::1,0.0.0.0"))
        )
    if len(tempfile.gettempdir()) > _LONGEST and os.access("/tmp", os.W_OK):
        environ.setdefault(FOLDERS, "/tmp")
