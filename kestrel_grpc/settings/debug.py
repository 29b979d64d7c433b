"""DebugConfig: the folders for profiles and captured requests, and their limits. The default writes neither.

These settings only allow profiles and captures. AdminService starts them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, checked

_MIB = 1024 * 1024
DEBUG = SettingGroup("profiles and captures", "debug")


def writable_folder(text: str) -> str:
    """``text``, if it names a folder that this process may write to. Raises ValueError."""
    if not os.path.isdir(text):
        raise ValueError("the folder does not exist")
    if not os.access(text, os.W_OK | os.X_OK):
        raise ValueError("this process may not write to the folder")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """Without a folder (None) the feature is refused. A limit counts all profiles or captures in the folder, also those
    of earlier processes. Raises ConfigError."""

    profile_dir: str | None = DEBUG.setting(
        None,
        "folder for the profiles that 'kestrel-grpc admin profile' records of the step thread and the device",
        metavar="FOLDER",
        parse=writable_folder,
        shown="none: profiles are refused",
    )
    profile_max_bytes: int = checked(1024 * _MIB, low=0)
    """Limit on the bytes of all profiles in that folder."""
    capture_dir: str | None = DEBUG.setting(
        None,
        "folder to which 'kestrel-grpc admin capture' may write failing requests, with their texts",
        metavar="FOLDER",
        parse=writable_folder,
        shown="none: captures are refused",
    )
    capture_images: bool = DEBUG.setting(False, "allow captures to hold images of the requests")
    capture_max_files: int = checked(100, low=0)
    """Limit on captured requests in that folder."""
    capture_max_bytes: int = checked(256 * _MIB, low=0)
    """Limit on the bytes of all captured requests in that folder."""

    def __post_init__(self) -> None:
        check_settings(self)
