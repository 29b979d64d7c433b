"""The system calls that a confined process may make, and the program for seccomp(2) that enforces the table.

A call that is not in the table ends the process (SIGSYS). Calls by which libraries look for optional files fail with
EPERM. Calls that are newer than the table fail with ENOSYS: the C library then uses the older call.
"""

from __future__ import annotations

import platform
import struct
import sys
from pathlib import Path

_ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}
"""Machine to its column of system_calls.txt and AUDIT_ARCH_* of linux/audit.h."""

_COLUMN, _ARCHITECTURE = _ARCHITECTURES.get(platform.machine(), (0, 0))
_CALLS = Path(__file__).with_name("system_calls.txt").read_text().split("\n")[:-1]
NUMBERS = {
    row[0]: int(row[_COLUMN]) for row in map(str.split, _CALLS) if _COLUMN and row[_COLUMN] != "-"
}
"""Name to number of all calls before _FIRST_NEW that this machine's architecture has."""
_NAMES = {number: name for name, number in NUMBERS.items()}

_ALLOWED = (
    # memory
    *("brk", "madvise", "mremap", "munmap"),
    # threads and time
    *("clock_getres", "clock_gettime", "clock_nanosleep", "exit", "exit_group", "futex", "getpid"),
    *("getrandom", "getrusage", "gettid", "gettimeofday", "membarrier", "nanosleep"),
    *("restart_syscall", "rseq", "sched_getaffinity", "sched_yield", "setitimer"),
    *("set_robust_list", "sysinfo"),
    # signals of its own
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack"),
    # descriptors that it holds
    *("close", "fstat", "ftruncate", "lseek", "pread64", "pwrite64", "read", "readv"),
    *("recvfrom", "recvmsg", "sendmsg", "sendto", "write", "writev"),
)

_REFUSED = (
    *("access", "faccessat", "getcwd", "ioctl", "lstat", "newfstatat", "open", "openat"),
    *("readlink", "readlinkat", "stat", "statx", "uname"),
)

_ANY = 0xFFFFFFFF
_PROT_EXEC = 0x4
_THREAD = 0x00010000 | 0x00000100
"""CLONE_THREAD and CLONE_VM."""
_F_GETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 1, 3, 1030
_PR_SET_NAME, _PR_SET_VMA = 15, 0x53564D41

_FIRST_NEW = 424
"""Later calls have the same number on all architectures. Those that a process needs have older forms."""

_ALLOW, _ERRNO, KILL, NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_EPERM, _ENOSYS = 1, 38
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data. The lower half of an argument is the first on both architectures."""


def is_known_machine() -> bool:
    """Whether this system and architecture have a table."""
    return sys.platform == "linux" and platform.machine() in _ARCHITECTURES and sys.maxsize > 2**32


def name_of(number: int) -> str:
    """The name of a system call of this machine, or what is known of it."""
    return _NAMES.get(number, f"{number} of {platform.machine()}")


def program(pid: int, otherwise: int = KILL) -> bytes:
    """Returns the filter of process ``pid``: an array of struct sock_filter. ``otherwise``: the effect of a call that
    is not allowed, NOTIFY or the end of the process."""
    conditions = (
        # call, argument, bits of it that count, their values
        ("mmap", 2, _PROT_EXEC, (0,), _ERRNO | _EPERM),
        ("mprotect", 2, _PROT_EXEC, (0,), _ERRNO | _EPERM),
        ("clone", 0, _THREAD, (_THREAD,), otherwise),
        ("fcntl", 1, _ANY, (_F_GETFD, _F_GETFL, _F_DUPFD_CLOEXEC), otherwise),
        ("prctl", 0, _ANY, (_PR_SET_NAME, _PR_SET_VMA), otherwise),
        ("prlimit64", 0, _ANY, (0, pid), otherwise),
        ("tgkill", 0, _ANY, (pid,), otherwise),  # as abort(3) does it
    )
    made = [_step(_LOAD, _ARCH), _step(_EQUAL, _ARCHITECTURE, 1), _step(_RETURN, KILL)]
    made.append(_step(_LOAD, _NUMBER))
    for table, action in ((_ALLOWED, _ALLOW), (_REFUSED, _ERRNO | _EPERM)):
        for name in table:
            if (number := NUMBERS.get(name)) is not None:
                made += [_step(_EQUAL, number, 0, 1), _step(_RETURN, action)]
    for name, argument, bits, values, action in conditions:
        check = [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, bits)]
        for value in values:
            check += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
        check.append(_step(_RETURN, action))
        made += [_step(_EQUAL, NUMBERS[name], 0, len(check)), *check]
    made += [_step(_AT_LEAST, _FIRST_NEW, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    made.append(_step(_RETURN, otherwise))
    return b"".join(made)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
