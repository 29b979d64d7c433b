"""Code in the place of a decoder's ``serve``: it tries what an attacker would try, and reports what it reached.

Each function with ``attack`` reaches something, or raises OSError, AssertionError, MemoryError or ValueError.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable

from kestrel_engine.confinement import own_confinement
from kestrel_engine.confinement.own_memory import open_count
from kestrel_engine.processes import Fork

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
MAP_NORESERVE = 0x4000
SERVER = os.getppid()
"""When the template imports this module, its parent is the process of the test."""


ATTACKS: dict[str, Callable[[], None]] = {}
WORK: dict[str, Callable[[], None]] = {}
"""What a decoder needs."""


def attack(function: Callable[[], None]) -> Callable[[], None]:
    ATTACKS[function.__name__] = function
    return function


def work(function: Callable[[], None]) -> Callable[[], None]:
    WORK[function.__name__] = function
    return function


def call(x86: int, arm: int | None, *arguments: object) -> int:
    """A raw system call. Raises OSError."""
    number = x86 if X86 else arm
    if number is None:
        raise OSError(38, "not on this machine")
    found = LIBC.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


@attack
def environment() -> None:
    with open("/proc/self/environ", "rb") as file:
        found = file.read()
    assert b"KESTREL_TEST_SECRET" in found


@attack
def inherited_environment() -> None:
    """The memory of the process itself, without a file."""
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(LIBC, "environ")
    texts, index = [], 0
    while environ[index] is not None:
        texts.append(environ[index])
        index += 1
    assert any(b"KESTREL_TEST_SECRET" in each for each in texts)


@attack
def memory_of_the_server() -> None:
    open(f"/proc/{SERVER}/mem", "r+b", buffering=0).close()


@attack
def environment_of_the_server() -> None:
    with open(f"/proc/{SERVER}/environ", "rb") as file:
        assert file.read()


@attack
def descriptors_of_the_server() -> None:
    assert os.listdir(f"/proc/{SERVER}/fd")


@attack
def command_lines_of_others() -> None:
    assert any(each.isdigit() for each in os.listdir("/proc"))


@attack
def read_a_file() -> None:
    open("/etc/passwd", "rb").close()


@attack
def write_a_file() -> None:
    path = f"/tmp/kestrel-probe-{os.getpid()}"
    open(path, "wb").close()
    os.unlink(path)


@attack
def list_a_folder() -> None:
    assert os.listdir("/"), "an empty folder"


@attack
def size_of_a_file() -> None:
    os.stat("/etc/passwd")


@attack
def change_a_mode() -> None:
    os.chmod("/dev/null", 0o666)


@attack
def link_a_file() -> None:
    os.symlink("/etc/passwd", path := f"/tmp/kestrel-link-{os.getpid()}")
    os.unlink(path)


@attack
def watch_files() -> None:
    assert LIBC.inotify_init1(0) >= 0


@attack
def open_by_openat2() -> None:
    how = (ctypes.c_uint64 * 3)(0, 0, 0)
    call(437, 437, -100, b"/etc/passwd", how, 24)


for name, family in (("inet", 2), ("inet6", 10), ("unix", 1), ("netlink", 16)):
    ATTACKS[f"{name}_socket"] = lambda family=family: socket.socket(
        family, socket.SOCK_DGRAM
    ).close()


@attack
def socket_pair() -> None:
    for each in socket.socketpair():
        each.close()


@attack
def io_uring() -> None:
    call(425, 425, 4, (ctypes.c_char * 120)())


@attack
def run_a_shell() -> None:
    assert subprocess.run(["/bin/true"], check=False).returncode == 0


@attack
def execute_memory() -> None:
    """A file without a name, which is executed."""
    descriptor = os.memfd_create("probe")
    with open("/bin/true", "rb") as file:
        os.write(descriptor, file.read())
    pid = os.fork()
    if pid == 0:
        os.execve(descriptor, ["true"], {})
    assert os.waitpid(pid, 0)[1] == 0


@attack
def new_memory_file() -> None:
    os.close(os.memfd_create("probe"))


@attack
def executable_pages() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


@attack
def make_pages_executable() -> None:
    memory = mmap.mmap(-1, 4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert LIBC.mprotect(ctypes.c_void_p(address), 4096, 4 | 1) == 0


@attack
def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


@attack
def new_namespace() -> None:
    assert LIBC.unshare(0x10000000) == 0


@attack
def signal_the_server() -> None:
    os.kill(SERVER, 0)


@attack
def signal_the_template() -> None:
    os.kill(os.getppid(), 0)


@attack
def signal_by_a_descriptor() -> None:
    held = next(descriptor for descriptor in range(64) if is_open(descriptor))
    fcntl.fcntl(held, fcntl.F_SETOWN, SERVER)


def is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


@attack
def signal_by_pidfd() -> None:
    descriptor = call(434, 434, SERVER, 0)
    call(424, 424, descriptor, 0, None, 0)


@attack
def take_a_descriptor() -> None:
    descriptor = call(434, 434, SERVER, 0)
    call(438, 438, descriptor, 0, 0)


@attack
def trace_the_server() -> None:
    assert LIBC.ptrace(0x4206, SERVER, None, None) == 0  # PTRACE_SEIZE
    LIBC.ptrace(17, SERVER, None, None)


def access_memory(x86: int, arm: int) -> None:
    word = ctypes.create_string_buffer(8)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(word), 8)
    remote = (ctypes.c_uint64 * 2)(0, 8)
    try:
        call(x86, arm, SERVER, local, 1, remote, 1, 0)
    except OSError as error:
        if error.errno != errno.EFAULT:  # It was allowed, and nothing is mapped at the address.
            raise


@attack
def read_memory() -> None:
    access_memory(310, 270)


@attack
def write_memory() -> None:
    access_memory(311, 271)


@attack
def raise_limits() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert resource.getrlimit(resource.RLIMIT_DATA)[1] == resource.RLIM_INFINITY, before


@attack
def limits_of_the_server() -> None:
    resource.prlimit(SERVER, resource.RLIMIT_NOFILE)


@attack
def much_memory() -> None:
    memory = mmap.mmap(-1, 2**40, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    memory.close()


@attack
def dump_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (2**20, 2**20))


@attack
def many_descriptors() -> None:
    held = [
        os.dup(descriptor) for descriptor in range(50) if is_open(descriptor) for _ in range(100)
    ]
    assert len(held) >= 100
    for each in held:
        os.close(each)


@attack
def keys_of_the_kernel() -> None:
    call(250, 219, 0, -3, 1)


@attack
def page_faults_of_its_own() -> None:
    os.close(call(323, 282, 1))


@attack
def programs_in_the_kernel() -> None:
    try:
        call(321, 280, 0, (ctypes.c_char * 128)(), 128)
    except OSError as error:
        if error.errno == 1:
            raise


@attack
def performance_counters() -> None:
    attributes = (ctypes.c_uint32 * 32)(1, 128, 1)  # Software: the CPU's clock of this process.
    os.close(call(298, 241, attributes, 0, -1, -1, 0))


@attack
def mount() -> None:
    assert LIBC.mount(b"none", b"/mnt", b"tmpfs", 0, None) == 0
    LIBC.umount(b"/mnt")


@attack
def change_root() -> None:
    os.chroot("/")


@attack
def become_another_user() -> None:
    os.setresuid(-1, -1, -1)


@attack
def outlive_the_template() -> None:
    assert LIBC.prctl(1, 0, 0, 0, 0) == 0


@attack
def open_its_memory() -> None:
    assert LIBC.prctl(4, 1, 0, 0, 0) == 0


@attack
def shared_memory() -> None:
    assert LIBC.shmget(0, 4096, 0o1600) >= 0


@attack
def priority_of_the_server() -> None:
    os.setpriority(os.PRIO_PROCESS, SERVER, os.getpriority(os.PRIO_PROCESS, SERVER))


@attack
def other_instruction_set() -> None:
    """The 32-bit call of x86-64's x32."""
    if not X86:
        raise OSError(38, "not on this machine")
    call(0x40000000 + 39, None)


@work
def a_thread() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()


@work
def some_memory() -> None:
    bytearray(2**24)


def load() -> None:
    pass


def main(fork: Fork) -> None:
    """In place of a decoder. Does what the message on the line names, and reports what became of it."""
    wall = fork.job["wall"]
    if wall in ("landlock", "namespaces"):
        own_confinement._restrict_calls = lambda reports: (False, -1)  # type: ignore[assignment]
    if wall in ("seccomp", "namespaces"):
        own_confinement._restrict_files = lambda: 0  # type: ignore[assignment]
    if wall in ("seccomp", "landlock"):
        fork.job["confine"] = "auto"  # The template has not made namespaces.
    memory = open_count()
    fork.confine(2**27, memory)
    message = fork.line.wait()
    assert message is not None
    try:
        (ATTACKS | WORK)[message["probe"]]()
        outcome = "reached"
    except (OSError, AssertionError, MemoryError, ValueError) as error:
        outcome = f"refused: {error!r}"
    fork.line.send({"outcome": outcome})
