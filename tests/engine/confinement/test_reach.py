"""What code in a decoder can reach: the real template forks it, and code of the test runs in place of the decoder's."""

import signal
import socket
import sys
from pathlib import Path

import pytest

from kestrel_engine import InferenceEngine, ModelLoadError, RuntimeConfig
from kestrel_engine.confinement import trial
from kestrel_engine.confinement.own_confinement import Confinement
from kestrel_engine.confinement.system_calls import name_of
from kestrel_engine.errors import ConfigError
from kestrel_engine.maintenance import Finding
from kestrel_engine.maintenance.device import check_confinement
from kestrel_engine.processes import Line, Template
from kestrel_engine.processes.template import start_confined
from kestrel_engine.skills.constraints.grammar_process import GrammarProcess
from kestrel_engine.types.constraint import Constraint
from tests.engine.confinement.probe import ATTACKS, WORK
from tests.engine.preprocess.decoders import decoders
from tests.forking.process import run_forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines decoders")

SECRET = "KESTREL_TEST_SECRET"
PROBE = "tests.engine.confinement.probe"
FILES = {"list_a_folder", "open_by_openat2", "read_a_file", "write_a_file"}
REACHED_OFF = FILES | {
    "executable_pages", "execute_memory", "fork", "inet_socket", "limits_of_the_server",
    "new_memory_file", "run_a_shell", "signal_the_server", "signal_the_template",
    "size_of_a_file", "unix_socket",
}  # fmt: skip
"""What every user may do, in a container too."""


@pytest.fixture(scope="module")
def reach():
    """A function that runs one probe in a decoder, and returns what became of it and how the decoder ended."""
    templates = {}

    def run(name: str, mode: str = "auto", wall: str = "") -> tuple[str | None, int, int | None]:
        if wall not in templates:
            templates[wall] = Template(start_confined)
        ours, theirs = socket.socketpair()
        with ours, pytest.MonkeyPatch.context() as patched:
            patched.setenv(SECRET, "in the server's environment")
            templates[wall].start(PROBE)
            if wall in ("landlock", "seccomp"):
                mode = "off"  # The probe confines itself, without namespaces.
            with theirs:
                templates[wall].fork(theirs, module=PROBE, confine=mode, wall=wall)
            line, outcome = Line(ours), None
            line.send({"probe": name})
            while True:
                message = line.wait()
                assert message is not None, "the template ended"
                if "ended" in message:
                    return outcome, message["ended"], message["call"]
                outcome = message["outcome"]

    yield run
    for template in templates.values():
        template.stop()


@pytest.fixture(scope="module")
def confined():
    found = trial.found()
    if not found.suffices:
        pytest.skip(f"this kernel offers {found}")
    return found


@pytest.mark.parametrize("name", sorted(REACHED_OFF))
def test_without_confinement_the_probe_reaches_it(reach, name):
    assert reach(name, "off") == ("reached", 0, None)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_confined_decoder_reaches_nothing(reach, confined, name):
    outcome, ended, call = reach(name, "require")
    if outcome is None:
        assert ended == -signal.SIGSYS
        assert call is None or name_of(call)  # None: the filter of a container was first.
    else:
        assert outcome.startswith("refused: "), outcome


@pytest.mark.parametrize("name", sorted(WORK))
def test_a_confined_decoder_can_work(reach, confined, name):
    assert reach(name, "require") == ("reached", 0, None)


@pytest.mark.parametrize("wall", ["landlock", "seccomp", "namespaces"])
@pytest.mark.parametrize("name", sorted(FILES))
def test_each_wall_alone_keeps_files_away(reach, confined, name, wall):
    if not getattr(confined, wall):
        pytest.skip(f"this system offers {confined}")
    outcome, _, _ = reach(name, "auto", wall)
    assert outcome is None or outcome.startswith("refused: "), outcome


def test_the_report_of_a_call_names_it(reach, confined):
    outcome, ended, call = reach("inet_socket")
    assert (outcome, ended, name_of(call)) == (None, -signal.SIGSYS, "socket")


_HIDDEN = """
import os, sys
from kestrel_engine.confinement.own_confinement import hide_memory
if os.getuid() == 0:  # Root may read all.
    os.setgroups([]), os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
if sys.argv[1] == "hidden":
    hide_memory()
else:
    import ctypes
    ctypes.CDLL(None).prctl(4, 1)  # The change of the user has hidden it.
server, found = os.getpid(), []
if os.fork():
    os.wait()
    print(len(os.listdir("/proc/self/fd")) > 0, len(os.readlink("/proc/self/fd/1")) > 0)
else:
    for name in ("environ", "mem", "fd"):
        try:
            path = f"/proc/{server}/{name}"
            os.listdir(path) if name == "fd" else os.close(os.open(path, os.O_RDONLY))
            found.append(name)
        except PermissionError:
            pass
    print(*found, flush=True)
"""


@pytest.mark.parametrize(("mode", "open_to_others"), [("open", "environ mem fd"), ("hidden", "")])
def test_a_server_closes_its_memory_and_still_counts_its_own_files(mode, open_to_others):
    done = run_forked([sys.executable, "-c", _HIDDEN, mode], text=True)
    assert done.stdout == f"{open_to_others}\nTrue True\n"


def test_the_compiler_of_constraints_is_confined(confined):
    before, process = decoders(), GrammarProcess("require")
    assert process.problem(Constraint("regex", "[a-z]{3}")) == ""
    (pid,) = decoders() - before
    status = Path(f"/proc/{pid}/status").read_text()
    process.close()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert (fields["Seccomp"].strip(), fields["NoNewPrivs"], fields["Threads"]) == ("2", "1", "1")
    assert int(fields["CapEff"], 16) == 0


def test_a_machine_that_lacks_it_is_told_and_required_confinement_refuses(monkeypatch):
    monkeypatch.setattr(trial, "found", lambda: Confinement(0, True, False))
    assert trial.check("auto") == "no landlock, seccomp, no namespaces"
    assert trial.check("off") == "not confined (--confine off)"
    with pytest.raises(ConfigError, match="confine='require': this system offers no landlock"):
        trial.check("require")


_CONTAINER = """
import ctypes, platform, struct, sys
from kestrel_engine.confinement import own_confinement, system_calls, trial
rules = [(0x20, 0, 0, 0)]
for name in sys.argv[1:]:
    rules += [(0x15, 0, 1, system_calls.NUMBERS[name]), (0x06, 0, 0, 0x00050001)]
rules.append((0x06, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
own_confinement._call("prctl", 38, 1, 0, 0, 0)
header = struct.pack("=HxxxxxxQ", len(rules), ctypes.addressof(program))
own_confinement._call("syscall", own_confinement._SECCOMP[platform.machine()], 1, 0, header)
print(trial.check("require"))
"""


@pytest.mark.parametrize("refused", [["unshare", "mount"], ["chroot"]], ids=["docker", "podman"])
def test_it_works_within_the_filter_of_a_container_or_a_unit(confined, refused):
    """All allow seccomp and Landlock. Docker's and RestrictNamespaces= refuse namespaces; Podman's and CRI-O's refuse
    the change of the root to a container without capabilities."""
    done = run_forked([sys.executable, "-c", _CONTAINER, *refused], text=True)
    assert done.stdout == f"landlock {confined.landlock}, seccomp, no namespaces\n"


_LARGE = """
import os
from kestrel_engine.confinement import own_confinement
segment = os.memfd_create("segment")
own_confinement._bound(2**20)
os.ftruncate(segment, 2**20 + own_confinement._SPARE_BYTES)
os.ftruncate(segment, 2**20 + own_confinement._SPARE_BYTES + 1)
"""


def test_a_segment_grows_no_larger_than_the_images_of_a_decoder():
    done = run_forked([sys.executable, "-c", _LARGE], text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: [Errno 27] File too large\n")


def test_doctor_says_what_confines_decoders(confined, monkeypatch):
    assert [*check_confinement("auto")] == [Finding("decoders", "ok", str(confined))]
    assert [found.status for found in check_confinement("off")] == ["warn"]
    monkeypatch.setattr(trial, "found", lambda: Confinement(0, True, False))
    assert [found.status for found in check_confinement("auto")] == ["warn"]
    assert [found.status for found in check_confinement("require")] == ["fail"]


async def test_the_start_says_it_and_refuses_before_it_reads_weights(monkeypatch, caplog):
    async def no_weights(*_):
        raise ModelLoadError("weights are read now")

    monkeypatch.setattr("kestrel_engine.engine.build_off_loop", no_weights)
    monkeypatch.setattr(trial, "found", lambda: Confinement(0, True, False))
    with caplog.at_level("INFO"), pytest.raises(ModelLoadError):
        await InferenceEngine.create(RuntimeConfig())
    assert "decoders: no landlock, seccomp, no namespaces" in caplog.messages
    with pytest.raises(ConfigError, match="confine='require'"):
        await InferenceEngine.create(RuntimeConfig(confine="require"))
