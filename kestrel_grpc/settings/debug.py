"""DebugConfig: where profiles and captured requests may be written, and how much. By default nowhere.

The flags only allow it; AdminService begins it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, setting

_MIB = 1024 * 1024
DEBUG = SettingGroup("profiles and captures", "debug")


def writable_folder(text: str) -> str:
    """``text``, if it names a folder that this process may write to. Raises ValueError."""
    if not os.path.isdir(text):
        raise ValueError("there is no such folder")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError("the folder can't be written to")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """A folder of None refuses the feature. The limits count all files of the kind in the folder, also those of earlier
    processes. Raises ConfigError."""

    profile_dir: str | None = setting(
        None,
        DEBUG,
        "where 'kestrel-grpc admin profile' may write what step thread and device do",
        metavar="FOLDER",
        parse=writable_folder,
        shown="refused",
    )
    profile_max_bytes: int = setting(
        1024 * _MIB,
        DEBUG,
        "most bytes of all profiles in that folder",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )
    capture_dir: str | None = setting(
        None,
        DEBUG,
        "where 'kestrel-grpc admin capture' may write requests that fail, with their texts",
        metavar="FOLDER",
        parse=writable_folder,
        shown="refused",
    )
    capture_pictures: bool = setting(False, DEBUG, "let it write their images too", bare="on")
    capture_max_files: int = setting(
        100, DEBUG, "most captured requests in that folder", kind="whole", metavar="N", low=0
    )
    capture_max_bytes: int = setting(
        256 * _MIB,
        DEBUG,
        "most bytes of all captured requests in that folder",
        kind="bytes",
        metavar="SIZE",
        low=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)
