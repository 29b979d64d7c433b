"""How a process confines itself, in steps that can't be undone.

``leave_surroundings`` may come before forks, as the namespaces hold for all children. ``confine`` is for the process
that works on untrusted bytes. What the kernel does not offer is left out, and `Confinement` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import resource
import struct
import sys
from dataclasses import dataclass

from . import system_calls
from .own_memory import open_count, read_count

_SPARE_BYTES = 256 * 2**20
"""Private memory beyond what an image may take: stacks of threads, and what allocators keep."""
_SPARE_ADDRESSES = 4 * 2**30
"""Addresses beyond that: each thread's allocator reserves 128 MiB and uses little of it."""
_MOST_FILES = 64

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_NEW_SPACES = 0x10000000 | 0x40000000 | 0x08000000 | 0x00020000 | 0x04000000
"""User, network, IPC, mount and UTS. A new one for processes would end with its first process."""
_MS_BIND, _MS_REMOUNT, _MS_RDONLY, _MS_REC, _MS_PRIVATE = 4096, 32, 1, 16384, 1 << 18
_CAPABILITY_VERSION = 0x20080522
_ROOT = b"/dev"
"""The folder that every system has. In the new mounts it is empty and can't be written."""

_LANDLOCK_CREATE, _LANDLOCK_RESTRICT, _LANDLOCK_VERSION = 444, 446, 1
_RIGHTS_TO_FILES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Version of Landlock to the number of its rights to files. Later versions have no more."""
_RIGHTS_TO_TCP, _SCOPES = 0b11, 0b11
"""Bind and connect, since version 4. Abstract unix sockets and signals, since version 6."""

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE_NOTICE, _NOTICE_BYTES = 0xC0502100, 80

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Confinement:
    """What confines a process. ``landlock``: the version of its interface, 0 without."""

    landlock: int = 0
    seccomp: bool = False
    namespaces: bool = False

    def __str__(self) -> str:
        parts = (
            f"landlock {self.landlock}" if self.landlock else "no landlock",
            "seccomp" if self.seccomp else "no seccomp",
            "namespaces" if self.namespaces else "no namespaces",
        )
        return ", ".join(parts)

    @property
    def suffices(self) -> bool:
        """Whether the process reaches nothing. Namespaces are a second wall, which some systems forbid."""
        return bool(self.landlock) and self.seccomp


def hide_memory() -> None:
    """On Linux, closes this process's memory, environment and descriptors to other processes of its user, and turns
    core dumps off."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def leave_surroundings() -> bool:
    """Gives this process and its children an empty network, mounts and users. Returns whether the kernel permits it.
    Needs one thread."""
    if sys.platform != "linux":
        return False
    try:
        _call("unshare", _NEW_SPACES)
        _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", b"none", _ROOT, b"tmpfs", 0, b"size=4k,mode=555")
        _call("mount", None, _ROOT, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None)
    except OSError:
        return False
    return True


def close_all_but(*kept: int) -> None:
    """Closes all descriptors that are not ``kept``."""
    first = 0
    for descriptor in sorted(kept):
        if first < descriptor:
            os.closerange(first, descriptor)
        first = max(first, descriptor + 1)
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(num_bytes: int, namespaces: bool, *, reports: bool = False) -> tuple[Confinement, int]:
    """Confines this process, which has one thread. Afterwards no path leads to a file.

    ``num_bytes``: private memory that its work takes. ``namespaces``: what ``leave_surroundings`` returned.
    ``reports``: another process watches this one with the descriptor that is the second value, else -1. A call that is
    not allowed waits until that process has read it (``next_call``) and killed this one. Raises OSError if a step fails
    that every kernel offers.
    """
    _bound(num_bytes)
    if sys.platform != "linux":
        return Confinement(), -1
    if namespaces:
        try:
            os.chroot(_ROOT)
            os.chdir("/")
        except OSError:  # The filter of a container may allow namespaces, and forbid this.
            namespaces = False
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))
    hide_memory()
    landlock = _restrict_files()
    seccomp, listener = _restrict_calls(reports)
    return Confinement(landlock, seccomp, namespaces), listener


def next_call(listener: int) -> int:
    """Returns the number of a system call that ``confine`` did not allow. Raises OSError if the process has ended."""
    notice = bytearray(_NOTICE_BYTES)
    fcntl.ioctl(listener, _RECEIVE_NOTICE, notice)
    return int.from_bytes(notice[16:20], "little")


def _bound(num_bytes: int) -> None:
    """Sets hard limits. The limit on processes is one of the user and counts threads, so the filter bounds them. The
    limit on CPU time would end a process that has served many images."""
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_FSIZE: num_bytes + _SPARE_BYTES,
    }
    with contextlib.suppress(OSError):  # Without /proc, no limit on memory has an effect.
        count = open_count()
        addresses, private = read_count(count)
        os.close(count)
        limits[resource.RLIMIT_AS] = addresses + num_bytes + _SPARE_ADDRESSES
        limits[resource.RLIMIT_DATA] = private + num_bytes + _SPARE_BYTES
    for limit, most in limits.items():
        _, hard = resource.getrlimit(limit)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))


def _restrict_files() -> int:
    """Forbids all access to files, TCP, abstract sockets and signals to others that Landlock knows. Returns its
    version; 0 without."""
    try:
        version = landlock_version()
        files = (1 << _RIGHTS_TO_FILES[min(version, max(_RIGHTS_TO_FILES))]) - 1
        tcp, scopes = (_RIGHTS_TO_TCP if version >= 4 else 0), (_SCOPES if version >= 6 else 0)
        rules = struct.pack("=QQQ", files, tcp, scopes)
        length = 8 if version < 4 else 16 if version < 6 else 24
        ruleset = _call("syscall", _LANDLOCK_CREATE, rules, length, 0)
        try:
            _call("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
        finally:
            os.close(ruleset)
    except OSError:
        return 0
    return version


def landlock_version() -> int:
    """Raises OSError if the kernel has no Landlock."""
    return _call("syscall", _LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)


def _restrict_calls(reports: bool) -> tuple[bool, int]:
    """Returns whether the filter holds, and the descriptor of its notices or -1."""
    if not system_calls.is_known_machine():
        return False, -1
    # Kernels before 5.0 give no notices, and a container that has asked for them itself gets no more.
    for otherwise, flags in ((system_calls.NOTIFY, _NEW_LISTENER), (system_calls.KILL, 0)):
        if otherwise == system_calls.NOTIFY and not reports:
            continue
        program = system_calls.program(os.getpid(), otherwise)
        memory = ctypes.create_string_buffer(program)
        header = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(memory))
        try:
            found = _call("syscall", _SECCOMP[platform.machine()], _SET_FILTER, flags, header)
        except OSError:
            continue
        return True, found if flags else -1
    return False, -1


def _call(name: str, *arguments: int | bytes | None) -> int:
    """Calls a function of the C library. Raises OSError."""
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    found: int = _libc[name](*values)
    if found < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return found
