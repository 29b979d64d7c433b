"""Writes the folder ``synchronous`` of the client from the folder ``asynchronous``.

    python clients/python/generate_sync.py [--check]

``--check`` writes nothing, and fails if a file is out of date. Needs ruff.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent / "kestrel_client"
_HEADER = "# Generated from asynchronous/{} by generate_sync.py. Never edit; run `make protos`.\n"
_REPLACEMENTS = (
    (r"\basynchronous client", "synchronous client"),
    (r" from one event loop\.", ". Safe to share between threads."),
    (r"await aclose\(\)", "close()"),
    (r"\bimport asyncio\b", "import time"),
    (r"\bawait asyncio\.to_thread\((\S+), ", r"\1("),
    (r"\basyncio\.sleep", "time.sleep"),
    (r"\basync (def|with|for)\b", r"\1"),
    (r"``async with``", "``with``"),
    (r"\bawait ", ""),
    (r"\b(_*)aclose\b", r"\1close"),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\bAsync(?=[A-Z])|\basync_", ""),
    (r"\bgather_bounded\b", "run_bounded"),
)


def synchronous(source: Path) -> str:
    """The synchronous form of a module, formatted."""
    text = source.read_text(encoding="utf-8")
    for pattern, replacement in _REPLACEMENTS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    ruff = [sys.executable, "-m", "ruff", "--quiet"]
    name = ["--stdin-filename", str(_PACKAGE / "synchronous" / source.name)]
    # Shorter names change the order of imports, and modules that only an event loop needs stay unused.
    sorting = [*ruff, "check", "--select", "I,F401", "--fix", *name, "-"]
    for command in (sorting, [*ruff, "format", *name, "-"]):
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr or done.stdout)
        text = done.stdout
    return _HEADER.format(source.name) + text


def main() -> None:
    stale = []
    for source in sorted((_PACKAGE / "asynchronous").glob("[!_]*.py")):
        target = _PACKAGE / "synchronous" / source.name
        text = synchronous(source)
        if not target.exists() or text != target.read_text(encoding="utf-8"):
            stale.append(target.name)
            if "--check" not in sys.argv:
                target.write_text(text, encoding="utf-8")
    if stale and "--check" in sys.argv:
        raise SystemExit(f"not up to date, run clients/python/generate_sync.py: {', '.join(stale)}")


if __name__ == "__main__":
    main()
