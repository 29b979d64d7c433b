"""Children that end with their parent: real processes, killed for real."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from kestrel_engine.processes import parent_death
from tests.waiting import wait_until

CHILD = """
import importlib.util, re, sys, time
spec = importlib.util.spec_from_file_location("parent_death", {module!r})
parent_death = importlib.util.module_from_spec(spec)
spec.loader.exec_module(parent_death)
parent_death.end_with_parent(int(sys.argv[1]), {options})
print("ready", flush=True)
{work}
"""

MODULE = parent_death.__file__
"""Children run this file alone. To import the package takes a second."""

PARENT = """
import os, subprocess, sys, time
ours, theirs = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], str(ours)], pass_fds=(ours,), stdout=subprocess.PIPE, text=True
)
assert child.stdout.readline() == "ready\\n"
print(child.pid, flush=True)
time.sleep(600)
"""

SLEEP = "time.sleep(600)"
HOLDS_THE_INTERPRETER = 're.match("(a*)*b", "a" * 64)'
"""A match that takes years, in one call into C that never lets another thread run."""


@contextmanager
def family(
    options: str = "", work: str = SLEEP
) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """A parent, and its child's process."""
    child_code = CHILD.format(module=MODULE, options=options, work=work)
    command = [sys.executable, "-c", PARENT, child_code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            yield parent, child
        finally:
            parent.kill()
            if child.is_running():
                child.kill()


def has_ended(process: psutil.Process) -> bool:
    """A zombie has ended: its new parent may wait for it late."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("options", ["", "kernel_signal=True"], ids=["pipe", "kernel"])
def test_a_child_ends_with_its_parent(number, options):
    with family(options) as (parent, child):
        assert child.is_running()
        parent.send_signal(number)
        wait_until(lambda: has_ended(child))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_kernel_ends_a_child_in_which_no_python_runs():
    with family("kernel_signal=True", HOLDS_THE_INTERPRETER) as (parent, child):
        begun = child.cpu_times().user
        wait_until(lambda: child.cpu_times().user > begun + 0.1)
        parent.kill()
        wait_until(lambda: has_ended(child))


def test_a_parent_that_ended_before_the_call_ends_the_child():
    ours, theirs = os.pipe()
    os.close(theirs)
    child = CHILD.format(module=MODULE, options="", work=SLEEP)
    with subprocess.Popen(
        [sys.executable, "-c", child, str(ours)], pass_fds=(ours,), stdout=subprocess.DEVNULL
    ) as process:
        assert process.wait(60) == -signal.SIGKILL
    os.close(ours)
