"""Machine: a copy of this machine that systemd boots in a container, in an overlay of this machine's file system."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_UNIT = """
[Unit]
Description=The commands of a test
SuccessAction=exit-force
FailureAction=exit-force
[Service]
Type=oneshot
WorkingDirectory=/root
ExecStart=/bin/bash -eux /commands
StandardOutput=file:/printed
StandardError=file:/printed
"""


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, commands: str) -> str:
        """Runs shell commands as root, without systemd, in this machine's network. Returns what they print."""
        passed = [
            f"--setenv={name}={value}"
            for name, value in os.environ.items()
            if name.startswith("PIP_")
        ]
        (self.root / "commands").write_text(commands)
        return self._nspawn(*passed, "--chdir=/root", "/bin/bash", "-eux", "/commands")

    def boot(self, commands: str) -> str:
        """Boots systemd in a network of its own. It runs shell commands as root, and ends. Returns what they print."""
        (self.root / "commands").write_text(commands)
        (self.root / "etc/systemd/system/commands.service").write_text(_UNIT)
        printed = self.root / "printed"
        try:
            self._nspawn("--private-network", "--boot", "systemd.unit=commands.service")
        except AssertionError:
            raise AssertionError(printed.read_text() if printed.exists() else "no boot") from None
        return printed.read_text()

    def _nspawn(self, *arguments: str) -> str:
        options = (
            *("--quiet", "--register=no", "--keep-unit", "--console=pipe"),
            # Decoders are confined by them. Older versions of systemd-nspawn refuse Landlock.
            "--system-call-filter=landlock_create_ruleset landlock_add_rule landlock_restrict_self",
        )
        done = subprocess.run(
            ["systemd-nspawn", *options, f"--directory={self.root}", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=840,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout + done.stderr


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Skips the test where no machine can be made."""
    if sys.platform != "linux" or os.geteuid() or shutil.which("systemd-nspawn") is None:
        pytest.skip("needs root on Linux and systemd-nspawn (systemd-container)")
    upper, work, root = (folder / name for name in ("upper", "work", "root"))
    for each in (upper, work, root):
        each.mkdir()
    options = f"lowerdir=/,upperdir={upper},workdir={work}"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(root)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs overlays of the root's file system")
    try:
        yield Machine(root)
    finally:
        subprocess.run(["umount", str(root)], check=True)
