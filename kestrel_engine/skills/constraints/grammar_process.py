"""A process that compiles a constraint first, so that one which takes too long can be ended.

No code can end a thread that is inside the library, and its own limits do not bound the time for every grammar: an
intersection of 20 expressions takes hours. The process has little memory and ends itself after half a second of
processor time. What it has compiled takes as long in the server.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading

from ...confinement import children
from ...confinement.steps import confine, leave_surroundings
from ...errors import RuntimeFailure
from ...types.constraint import Constraint

COMPILE_S = 0.5
"""Seconds of processor time to compile a constraint."""
_WALL_S = 20.0
"""The same by the clock, for a machine that has no processor time left."""
_MEMORY = 1 << 30
"""Bytes of address space."""

_MOST_ANSWER_BYTES = 64 * 1024


class GrammarProcess:
    """The process, which starts at its first use and again after it ended itself. Belongs to one thread."""

    def __init__(self, confine: str = "auto") -> None:
        """``confine``: one of ``confinement.MODES``."""
        self._confine = confine
        self._process: subprocess.Popen[bytes] | None = None

    def problem(self, constraint: Constraint) -> str:
        """What is wrong with the constraint, with the place; "" if nothing is.

        Raises RuntimeFailure if no process can be started.
        """
        request = json.dumps([constraint.kind, constraint.source]).encode() + b"\n"
        answer = b""
        # A process that ended between two requests, for any reason, is started again.
        for _ in range(2):
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request)
                process.stdin.flush()
            except OSError:
                self.close()
                continue
            # A process that a constraint controls may answer nothing, or without end.
            end = threading.Timer(2 * _WALL_S, process.kill)
            end.start()
            answer = process.stdout.readline(_MOST_ANSWER_BYTES)
            end.cancel()
            break
        with contextlib.suppress(ValueError, RecursionError):
            problem = json.loads(answer)
            if isinstance(problem, str):
                return problem
        self.close()
        return "takes too much time or memory to compile"

    def close(self) -> None:
        """Ends the process. Any thread may call it once no other call is running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = children.start(
                    __name__, self._confine, stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            except OSError as error:
                raise RuntimeFailure(f"no process can be started: {error}") from error
            # If it is killed, it is no zombie until a constraint needs it again.
            threading.Thread(target=self._process.wait, name="grammar-end", daemon=True).start()
        return self._process


def main(mode: str) -> None:
    """The process: answers requests until its input is closed. ``mode``: of ``confinement.MODES``."""
    from .grammar_text import new_tokenizer, problem

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # A child inherits what its parent ignores and blocks.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit.
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    namespaces = mode != "off" and leave_surroundings()
    # What a constraint costs to compile hardly depends on the vocabulary.
    tokenizer = new_tokenizer([bytes([byte]) for byte in range(256)] + [b""], 256)
    problem(Constraint("regex", "a"), tokenizer)  # Opens and allocates what the first one needs.
    if mode != "off":
        result, _ = confine(_MEMORY, namespaces)
        if mode == "require" and not result.suffices:
            return
    for line in sys.stdin.buffer:
        kind, source = json.loads(line)
        # The signals end the process at once, also inside the library.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        signal.setitimer(signal.ITIMER_REAL, _WALL_S)
        answer = problem(Constraint(kind, source), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
