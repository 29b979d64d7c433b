"""Coverage-guided fuzzing: ``make fuzz MINUTES=10``, or ``python -m tests.fuzz TARGET`` for one target without end.

A target is a module of ``targets``, whose ``take`` reads bytes that a stranger may send, or a file that a stranger may
have written, and raises for a fault: an exception that the caller is not told about, an input that takes over a second
of processor time, or memory above the limit. Inputs that reach new code are kept in out/fuzz/TARGET, and so are
inputs that fail. Copy a failing input into tests/fuzz/corpus/TARGET once the fault is mended: test_corpus.py reads it.
"""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path

from .measured import MOST_MIB, within_limits

CORPUS = Path(__file__).parent / "corpus"
TARGETS = sorted(file.stem for file in (Path(__file__).parent / "targets").glob("[a-z]*.py"))
FOUND = Path("out/fuzz")
INSTRUMENTED = ["kestrel_engine", "kestrel_grpc", "kestrel_client"]
_SLOWDOWN = 5
"""Instrumented code takes up to so many times as long."""


def fuzz(name: str, *options: str) -> None:
    """Fuzzes a target until it fails or libFuzzer's ``options`` end it. Does not return."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        target = importlib.import_module(f"{__package__}.targets.{name}")
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        name,
        f"-artifact_prefix={found}/",
        f"-rss_limit_mb={MOST_MIB}",
        *("-timeout=120", "-max_len=16384", "-print_final_stats=1"),
        *options,
        *map(str, (found, CORPUS / name)),
    ]
    mutator = getattr(target, "mutate", None)
    atheris.Setup(
        arguments,
        within_limits(target.take, _SLOWDOWN),
        **({"custom_mutator": mutator} if mutator else {}),
    )
    atheris.Fuzz()


def fuzz_all(minutes: float) -> int:
    """Fuzzes all targets one after another, ``minutes`` together. Returns the number of targets that failed."""
    seconds = max(1, int(60 * minutes / len(TARGETS)))
    failed = []
    for name in TARGETS:
        print(f"== {name}: {seconds} s", flush=True)
        command = [sys.executable, "-m", __package__, name, f"-max_total_time={seconds}"]
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}; see {FOUND}" if failed else "no target failed")
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together")
    options, rest = parser.parse_known_args()
    if options.target is None:
        sys.exit(fuzz_all(options.minutes))
    fuzz(options.target, *rest)


if __name__ == "__main__":
    main()
