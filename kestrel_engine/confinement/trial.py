"""What confines processes on this machine, found by a process that confines itself."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

from ..errors import ConfigError
from . import children
from .own_confinement import Confinement, confine, leave_surroundings


@functools.cache
def found() -> Confinement:
    """Starts a process, which takes 0.1 s. Raises OSError if none can be started."""
    with children.start(__name__, stdout=subprocess.PIPE) as process:
        answer, _ = process.communicate()
    return Confinement(**json.loads(answer)) if answer else Confinement()


def main(argument: str) -> None:
    result, _ = confine(0, leave_surroundings())
    line = {name: getattr(result, name) for name in ("landlock", "seccomp", "namespaces")}
    os.write(1, json.dumps(line).encode())


def check(mode: str) -> str:
    """Returns what confines decoders with the setting ``mode``. Raises ConfigError for "require" if something is
    missing, and OSError."""
    if mode == "off":
        return "not confined (--confine off)"
    if mode == "require" and not found().suffices:
        limit = f"this system offers {found()}; decoders need landlock and seccomp (docs/run/security.md)"
        raise ConfigError("confine", mode, limit)
    return (
        str(found()) if sys.platform == "linux" else f"not confined: {sys.platform} has no Landlock"
    )
