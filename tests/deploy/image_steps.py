"""ImageSteps: runs the steps of a Dockerfile without Docker, in overlays of this machine's own file system.

Each stage is a root of its own: an overlay, changed by the stage's COPY and RUN steps in a chroot. This machine stands
for the base image. The overlays are mounted in a namespace of their own, and vanish with the process. This needs root
on Linux. Each step becomes the shell command that does the same.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.deploy.test_images import instructions

_PREPARE = """
set -eu
mount -t proc proc /proc
begin() {  # NAME: makes the root of a stage
  mkdir -p "$WORK/$1/upper" "$WORK/$1/work" "$WORK/$1/root"
  mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/$1/upper,workdir=$WORK/$1/work" "$WORK/$1/root"
  for each in /proc /dev /etc/resolv.conf /etc/hosts; do
    [ ! -e "$each" ] || mount --rbind "$each" "$WORK/$1/root$each"
  done
  # The interpreter may lie below a home, which users of an image could not read.
  path=$(dirname "$PYTHON_BASE")
  while [ "$path" != / ]; do chmod a+rx "$WORK/$1/root$path"; path=$(dirname "$path"); done
  for each in python pip; do
    [ -e "$PYTHON_BASE/bin/$each" ] || ln -s "${each}3" "$WORK/$1/root$PYTHON_BASE/bin/$each"
  done
}
"""


class ImageSteps:
    """The script of a Dockerfile's steps, and the environment, user and folder of its last stage."""

    def __init__(self, path: Path, context: Path, arguments: dict[str, str]) -> None:
        self.environment: dict[str, str] = {}
        self.user, self.folder, self.stage = "0:0", "/", ""
        self.health: list[str] = []
        self.start: list[str] = []
        self._context, self._arguments = context, arguments
        self._lines = [_PREPARE]
        for name, text in instructions(path):
            getattr(self, f"_{name.lower()}")(text)

    def script(self, then: str) -> str:
        """The whole script. ``then``: what the image's user runs at the end."""
        return "\n".join([*self._lines, self._inside(then)])

    def run(self, work: Path, then: str) -> subprocess.CompletedProcess[str]:
        """Runs the steps with overlays in ``work``, and ``then``."""
        # A namespace of processes too, so that nothing outlives the steps.
        enter = [
            "unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private",
        ]  # fmt: skip
        passed = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return subprocess.run(
            [*enter, "bash", "-c", self.script(then)],
            env={**passed, "PATH": os.environ["PATH"], "WORK": str(work), "PYTHON_BASE": sys.base_prefix},
            capture_output=True,
            text=True,
            timeout=840,
        )  # fmt: skip

    def _inside(self, command: str) -> str:
        """A command in the stage's root, with its folder, user and variables."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        user, group = self.user.split(":")
        enter = ["chroot", f"--userspec={user}:{group}", "--groups=", f"$WORK/{self.stage}/root"]
        inner = f"cd {shlex.quote(self.folder)} && {command}"
        words = ["env", *variables, "sh", "-euc", inner]
        return f'{" ".join(enter[:3])} "{enter[3]}" {shlex.join(words)}'

    def _from(self, text: str) -> None:
        base, _, name = text.partition(" AS ")
        assert base.startswith("python:")
        self.stage = name or "image"
        self.folder, self.user = "/", "0:0"
        self.environment = {
            "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        }
        self._lines.append(f"begin {self.stage}")

    def _arg(self, text: str) -> None:
        name, _, default = shlex.split(text)[0].partition("=")
        self.environment[name] = self._arguments.get(name, default)

    def _env(self, text: str) -> None:
        known = dict(self.environment)
        for word in shlex.split(text):
            name, _, value = word.partition("=")
            self.environment[name] = re.sub(r"\$(\w+)", lambda m: known.get(m[1], ""), value)

    def _workdir(self, text: str) -> None:
        self.folder = text
        self._lines.append(f'mkdir -p "$WORK/{self.stage}/root{text}"')

    def _user(self, text: str) -> None:
        self.user = text

    def _copy(self, text: str) -> None:
        words = shlex.split(text)
        root = shlex.quote(str(self._context)) + "/"
        if words[0].startswith("--from="):
            root = f'"$WORK/{words.pop(0).removeprefix("--from=")}/root"'
        *sources, target = words
        place = target if target.startswith("/") else f"{self.folder}/{target}"
        for source in sources:
            # As Docker does: the content of a folder becomes the content of the target.
            self._lines.append(
                f'source={root}{source}; target="$WORK/{self.stage}/root{place}"; '
                'if [ -d "$source" ]; then mkdir -p "$target" && cp -a "$source/." "$target"; '
                'else cp -a "$source" "$target"; fi'
            )

    def _run(self, text: str) -> None:
        self._lines.append(self._inside(text))

    def _healthcheck(self, text: str) -> None:
        self.health = json.loads(text[text.index("[") :])

    def _entrypoint(self, text: str) -> None:
        self.start = json.loads(text)

    def _cmd(self, text: str) -> None:
        self.start += json.loads(text)

    def _expose(self, text: str) -> None:
        """It only documents ports."""

    _stopsignal = _expose
