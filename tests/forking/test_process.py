"""A forked process is to its test what a new process is."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.forking.process import ForkedProcess, run_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux only")

TELL = """
import json, os, sys, threading
print(json.dumps({
    "arguments": sys.argv, "folder": os.getcwd(), "first": sys.path[0], "variables": dict(os.environ),
    "input": sys.stdin.read(), "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(),
    "group": os.getpgid(0), "main": __name__, "blocked": len(__import__("signal").pthread_sigmask(0, [])),
}))
print("said", file=sys.stderr)
"""


def both(*arguments, **options):
    """What a new process and a fork do."""
    command = [sys.executable, *arguments]
    new = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)
    return new, run_forked(command, text=True, **options)


def test_a_fork_is_given_what_a_new_process_is_given(tmp_path):
    variables = {"PATH": "/usr/bin", "SOME": "thing", "PYTHONPATH": str(tmp_path)}
    arguments = ("-c", TELL, "a", "b c")
    new, fork = both(*arguments, input="typed", cwd=tmp_path, env=variables)
    assert (fork.returncode, fork.stderr) == (new.returncode, new.stderr) == (0, "said\n")
    wanted, found = json.loads(new.stdout), json.loads(fork.stdout)
    assert wanted.pop("first") == "" and found.pop("first") == str(tmp_path)
    # Set by the interpreter as it starts.
    assert {**wanted["variables"], **variables} == {**wanted["variables"], **found["variables"]}
    wanted["variables"] = found["variables"]
    assert found == wanted


def test_a_module_runs_as_the_main_module(tmp_path):
    (tmp_path / "shown.py").write_text("import sys; print(__name__, __spec__.name, sys.argv)")
    new, fork = both("-m", "shown", "x", cwd=tmp_path)
    assert (new.stdout, new.returncode) == (fork.stdout, fork.returncode)
    assert fork.stdout == f"__main__ shown ['{tmp_path}/shown.py', 'x']\n"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit('no')",
        "raise ValueError('why')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        # Background jobs of a shell ignore SIGINT, and their children inherit that.
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "os.kill(os.getpid(), signal.SIGINT); signal.pause()",
        "import os; os._exit(7)",
        "import atexit; atexit.register(print, 'last')",
    ],
)
def test_a_fork_ends_as_a_new_process_does(code):
    new, fork = both("-c", code)
    assert (fork.returncode, fork.stdout) == (new.returncode, new.stdout)
    assert new.stderr.splitlines()[-1:] == fork.stderr.splitlines()[-1:]


def test_a_fork_is_given_open_files():
    pipes = [os.pipe() for _ in range(3)]
    kept = tuple(write for _, write in pipes)
    code = "import os, sys; [os.write(int(fd), fd.encode()) for fd in sys.argv[1:]]"
    command = [sys.executable, "-c", code, *map(str, kept)]
    with ForkedProcess(command, pass_fds=kept) as process:
        assert process.wait(60) == 0
    for read, write in pipes:
        os.close(write)
        assert os.read(read, 16) == str(write).encode() and os.read(read, 16) == b""
        os.close(read)


def test_a_fork_can_be_waited_for_and_killed():
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with ForkedProcess([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == process.poll() == -signal.SIGTERM
        process.kill()  # Of no effect, as it has ended.
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
