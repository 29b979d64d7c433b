"""DebugConfig: where profiles and captured requests may be written, and how much. By default nowhere.

The flags only allow it; AdminService begins it. Imports no engine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .server import Flags

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """None: it is refused. Bytes and files are those that the folder holds of the kind, whoever left them there."""

    profile_dir: str | None = None
    profile_max_bytes: int = 1024 * _MIB
    capture_dir: str | None = None
    capture_pictures: bool = False
    capture_max_files: int = 100
    capture_max_bytes: int = 256 * _MIB


def add_debug_flags(flags: Flags, size: Callable[[str], int], whole: Callable[[str], int]) -> None:
    """``size`` and ``whole`` read bytes and numbers."""
    defaults = DebugConfig()
    flags.add(
        "--profile-dir",
        type=writable_folder,
        metavar="FOLDER",
        shown="refused",
        help="where 'kestrel-grpc admin profile' may write what step thread and device do",
    )
    flags.add(
        "--profile-max-bytes",
        type=size,
        metavar="SIZE",
        default=defaults.profile_max_bytes,
        shown="1GiB",
        help="all profiles in that folder",
    )
    flags.add(
        "--capture-dir",
        type=writable_folder,
        metavar="FOLDER",
        shown="refused",
        help="where 'kestrel-grpc admin capture' may write requests that fail, with their texts",
    )
    flags.add(
        "--capture-pictures",
        choices=("on", "off"),
        nargs="?",
        const="on",
        default="off",
        help="let it write their pictures too",
    )
    flags.add(
        "--capture-max-files",
        type=whole,
        metavar="N",
        default=defaults.capture_max_files,
        help="captured requests in that folder",
    )
    flags.add(
        "--capture-max-bytes",
        type=size,
        metavar="SIZE",
        default=defaults.capture_max_bytes,
        shown="256MiB",
        help="all of them",
    )


def debug_config(args: argparse.Namespace) -> DebugConfig:
    return DebugConfig(
        profile_dir=args.profile_dir,
        profile_max_bytes=args.profile_max_bytes,
        capture_dir=args.capture_dir,
        capture_pictures=args.capture_pictures == "on",
        capture_max_files=args.capture_max_files,
        capture_max_bytes=args.capture_max_bytes,
    )


def writable_folder(text: str) -> str:
    """``text``, if it names a folder that we may write to. Raises ValueError."""
    if not os.path.isdir(text):
        raise ValueError("there is no such folder")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError("the folder can't be written to")
    return text
