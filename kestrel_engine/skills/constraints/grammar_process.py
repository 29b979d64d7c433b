"""A process that compiles a constraint first, so that one which takes too long can be ended.

No code can end a thread that is inside the library, and its own limits do not bound the time for every grammar: an
intersection of 20 expressions takes hours. The process has little memory and ends itself after half a second of
processor time. What it has compiled takes as long in the server.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading

from ...confinement.own_memory import open_count, read_count
from ...errors import RuntimeFailure
from ...processes.forking import Fork
from ...processes.lines import Line
from ...processes.template import confined
from ...types.constraint import Constraint

COMPILE_S = 0.5
"""Seconds of processor time to compile a constraint."""
_WALL_S = 20.0
"""The same by the clock, for a machine that has no processor time left."""
_MEMORY = 1 << 30
"""Bytes of address space that a constraint may take."""


class GrammarProcess:
    """The process, which starts at its first use and again after it ended itself. Belongs to one thread."""

    def __init__(self, confine: str = "auto") -> None:
        """``confine``: one of ``confinement.MODES``."""
        self._confine = confine
        self._line: Line | None = None
        self._number = 0

    def problem(self, constraint: Constraint) -> str:
        """What is wrong with the constraint, with the place; "" if nothing is.

        Raises RuntimeFailure if no process can be started.
        """
        # A process that ended between two requests, for any reason, is started again.
        for _ in range(2):
            line = self._running()
            # A process that a constraint controls may answer nothing, or without end.
            end = threading.Timer(2 * _WALL_S, confined.kill, (self._number,))
            end.start()
            try:
                line.send({"kind": constraint.kind, "source": constraint.source})
                answer = line.wait()
            except OSError:
                answer = None
            except ValueError:
                answer = {}
            is_late = not end.is_alive()
            end.cancel()
            if answer is not None and isinstance(problem := answer.get("problem"), str):
                return problem
            self.close()
            was_killed = answer is None or answer.get("ended") == -signal.SIGKILL
            if is_late or not was_killed:
                break
        return "takes too much time or memory to compile"

    def close(self) -> None:
        """Ends the process. Any thread may call it once no other call is running."""
        line, self._line = self._line, None
        if line is not None:
            confined.kill(self._number)
            line.close()

    def _running(self) -> Line:
        if self._line is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._number = confined.fork(theirs, module=__name__, confine=self._confine)
            except OSError as error:
                ours.close()
                raise RuntimeFailure(f"no process can be started: {error}") from error
            self._line = Line(ours)
        return self._line


def main(fork: Fork) -> None:
    """The process: answers requests until its line is closed."""
    from .grammar_text import new_tokenizer, problem

    # A child inherits what its parent ignores and blocks.
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit.
        count = open_count()
        most = read_count(count)[0] + _MEMORY
        os.close(count)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # What a constraint costs to compile hardly depends on the vocabulary.
    tokenizer = new_tokenizer([bytes([byte]) for byte in range(256)] + [b""], 256)
    problem(Constraint("regex", "a"), tokenizer)  # Opens and allocates what the first one needs.
    fork.confine(_MEMORY)
    while (request := fork.line.wait()) is not None:
        # The signals end the process at once, also inside the library.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
        signal.setitimer(signal.ITIMER_REAL, _WALL_S)
        answer = problem(Constraint(request["kind"], request["source"]), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        fork.line.send({"problem": answer})
