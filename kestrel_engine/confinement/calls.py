"""The system calls that a confined process may make, and the program for seccomp(2) that enforces the table.

A call that is not in the table ends the process (SIGSYS). Calls by which libraries look for optional files fail with
EPERM, so that the libraries go on without these. Calls that are newer than the table fail with ENOSYS, as on an older
kernel: the C library then uses the older call.
"""

from __future__ import annotations

import platform
import struct
import sys

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine to the column of the tables below and AUDIT_ARCH_* of linux/audit.h."""

_ALLOWED = {
    # memory
    "brk": (12, 214), "madvise": (28, 233), "mremap": (25, 216), "munmap": (11, 215),
    # threads and time
    "clock_getres": (229, 114), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "exit": (60, 93), "exit_group": (231, 94), "futex": (202, 98), "getpid": (39, 172),
    "getrandom": (318, 278), "getrusage": (98, 165), "gettid": (186, 178),
    "gettimeofday": (96, 169), "membarrier": (324, 283), "nanosleep": (35, 101),
    "restart_syscall": (219, 128), "rseq": (334, 293), "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124), "setitimer": (38, 103), "set_robust_list": (273, 99),
    "sysinfo": (99, 179),
    # signals of its own
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    # descriptors that it holds
    "close": (3, 57), "fstat": (5, 80), "ftruncate": (77, 46), "lseek": (8, 62),
    "pread64": (17, 67), "pwrite64": (18, 68), "read": (0, 63), "readv": (19, 65),
    "recvfrom": (45, 207), "recvmsg": (47, 212), "sendmsg": (46, 211), "sendto": (44, 206),
    "write": (1, 64), "writev": (20, 66),
}  # fmt: skip

_REFUSED = {
    "access": (21, None), "faccessat": (269, 48), "getcwd": (79, 17), "ioctl": (16, 29),
    "lstat": (6, None), "newfstatat": (262, 79), "open": (2, None), "openat": (257, 56),
    "readlink": (89, None), "readlinkat": (267, 78), "stat": (4, None), "statx": (332, 291),
    "uname": (63, 160),
}  # fmt: skip

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


def program(pid: int, otherwise: int = KILL) -> bytes:
    """Returns the filter of the process ``pid``: an array of struct sock_filter. ``otherwise``: what follows a call
    that is not allowed, NOTIFY or the end of the process."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    conditions = (
        # call, argument, bits of it that count, their values
        ((9, 222), 2, _PROT_EXEC, (0,), _ERRNO | _EPERM),  # mmap
        ((10, 226), 2, _PROT_EXEC, (0,), _ERRNO | _EPERM),  # mprotect
        ((56, 220), 0, _THREAD, (_THREAD,), otherwise),  # clone
        ((72, 25), 1, _ANY, (_F_GETFD, _F_GETFL, _F_DUPFD_CLOEXEC), otherwise),  # fcntl
        ((157, 167), 0, _ANY, (_PR_SET_NAME, _PR_SET_VMA), otherwise),  # prctl
        ((302, 261), 0, _ANY, (0, pid), otherwise),  # prlimit64
        ((234, 131), 0, _ANY, (pid,), otherwise),  # tgkill, as abort(3) does it
    )
    made = [_step(_LOAD, _ARCH), _step(_EQUAL, architecture, 1), _step(_RETURN, KILL)]
    made.append(_step(_LOAD, _NUMBER))
    for table, action in ((_ALLOWED, _ALLOW), (_REFUSED, _ERRNO | _EPERM)):
        for numbers in table.values():
            if (number := numbers[column]) is not None:
                made += [_step(_EQUAL, number, 0, 1), _step(_RETURN, action)]
    for numbers, argument, bits, values, action in conditions:
        check = [_step(_LOAD, _ARGUMENTS + 8 * argument), _step(_AND, bits)]
        for value in values:
            check += [_step(_EQUAL, value, 0, 1), _step(_RETURN, _ALLOW)]
        check.append(_step(_RETURN, action))
        made += [_step(_EQUAL, numbers[column], 0, len(check)), *check]
    made += [_step(_AT_LEAST, _FIRST_NEW, 0, 1), _step(_RETURN, _ERRNO | _ENOSYS)]
    made.append(_step(_RETURN, otherwise))
    return b"".join(made)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
