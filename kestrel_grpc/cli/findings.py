"""Prints the findings of ``doctor`` and ``verify``: one line each as they arrive, with remedies, or all as JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable

from kestrel_client.commands.parser import EXIT_FAILED
from kestrel_engine import maintenance

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


def print_findings(findings: Iterable[maintenance.Finding], *, as_json: bool) -> int:
    """Prints findings. Returns the exit status: EXIT_FAILED if a check failed."""
    printed = []
    for finding in findings:
        printed.append(finding)
        if as_json:
            continue
        _clear_line()
        print(f"{_MARKS[finding.status]}  {finding.check}: {finding.message}")
        if finding.remedy and finding.status != "ok":
            print(f"      -> {finding.remedy}")
        sys.stdout.flush()
    failed = sum(finding.status == "fail" for finding in printed)
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in printed], ensure_ascii=False))
    elif failed:
        print(f"{failed} of {len(printed)} checks failed", file=sys.stderr)
    return EXIT_FAILED if failed else 0


def _clear_line() -> None:
    """Clears the line of progress that a terminal may show."""
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
