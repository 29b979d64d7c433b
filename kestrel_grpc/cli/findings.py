"""How findings are told: a line each as they come, with remedies, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable

from kestrel_engine import maintenance

from .parser import EXIT_FAILED

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def tell(findings: Iterable[maintenance.Finding], *, as_json: bool) -> int:
    """Prints them; returns the exit status: EXIT_FAILED if one failed."""
    told = []
    for finding in findings:
        told.append(finding)
        if as_json:
            continue
        _clear_line()
        print(f"{_MARKS[finding.status]}  {finding.check}: {finding.message}")
        if finding.remedy and finding.status != "ok":
            print(f"      -> {finding.remedy}")
        sys.stdout.flush()
    failed = sum(finding.status == "fail" for finding in told)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in told], ensure_ascii=False))
    elif failed:
        print(f"{failed} of {len(told)} checks failed", file=sys.stderr)
    return EXIT_FAILED if failed else 0


def _clear_line() -> None:
    """Of progress that a terminal shows."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
