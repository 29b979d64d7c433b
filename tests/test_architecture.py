"""The house rules that a machine can check (docs/develop/architecture.md); import rules are import-linter's."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.real_time import WHY
from tests.waiting import WITHIN_S

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "kestrel_engine",
    ROOT / "kestrel_grpc",
    ROOT / "clients/python/kestrel_client",
    ROOT / "training",
]
SOURCES = sorted(p for package in PACKAGES for p in package.rglob("*.py") if "_pb" not in p.parts)


@cache
def parsed(path: Path) -> ast.Module:
    """CPython 3.11 counts the depth of a tree for all threads together (gh-106905): when another thread formats a
    traceback meanwhile, which parses source too, parsing fails for no fault of the file."""
    for _ in range(20):
        try:
            return ast.parse(path.read_text())
        except SystemError:
            time.sleep(0.05)
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """(absolute module, names) of each import statement."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, [alias.name for alias in node.names]


def public_names() -> list[str]:
    """What the engine's package exports: each is imported as itself."""
    tree = parsed(ROOT / "kestrel_engine/__init__.py")
    return [each.asname for node in tree.body for each in getattr(node, "names", ()) if each.asname]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_file_owns_one_thing_and_says_what():
    assert len(SOURCES) > 60
    vague = {"utils", "helpers", "common", "manager", "misc"}
    assert [name(path) for path in SOURCES if path.stem in vague] == []
    written = {path: path.read_text().strip() for path in SOURCES}
    docstring = re.compile(r'(#.*\s+)*r?"""')
    assert [
        name(path) for path, text in written.items() if text and not docstring.match(text)
    ] == []


def test_the_service_uses_public_names_of_the_engine_only():
    public = set(public_names())
    others = [
        (name(path), module, names)
        for path in sorted((ROOT / "kestrel_grpc").rglob("*.py"))
        if "kestrel_engine" in path.read_text()
        for module, names in imports(path)
        if module.split(".")[0] == "kestrel_engine"
        and (module != "kestrel_engine" or not public.issuperset(names))
    ]
    assert others == []


def test_what_other_programs_load_uses_the_sdk_only():
    files = sorted((ROOT / "clients/tools").rglob("*.py"))
    used = {module.split(".")[0] for path in files for module, _ in imports(path)}
    assert files and "kestrel_client" in used
    assert not used & {"kestrel_engine", "kestrel_grpc", "training", "tests"}


def test_the_engines_tests_know_no_other_room_of_tests():
    files = [p for room in ("engine", "kernels") for p in (ROOT / "tests" / room).rglob("*.py")]
    used = {module for path in files for module, _ in imports(path) if module.startswith("tests.")}
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()}
    others = rooms - {"engine", "kernels", "forking"}
    assert len(files) > 150
    assert [module for module in sorted(used) if module.split(".")[1] in others] == []


def test_importing_loads_no_more_than_it_must():
    wanted = {
        "kestrel_engine.scheduler.scheduler, tests.fake_runtime": {"torch", "grpc"},
        "kestrel_grpc": {"torch", "grpc", "kestrel_engine"},
        "kestrel_grpc.cli.serve": {"torch", "grpc"},
        "kestrel_grpc.cli.program": {"torch", "numpy", "pyvips", "kestrel_engine"},
        "kestrel_client.commands.program": {"grpc", "kestrel_engine", "kestrel_grpc"},
    }
    running = {
        module: subprocess.Popen(
            [sys.executable, "-c", f"import sys, {module}; print(*{absent!r} & set(sys.modules))"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for module, absent in wanted.items()
    }
    loaded = {module: process.communicate()[0].split() for module, process in running.items()}
    assert all(process.returncode == 0 for process in running.values())
    assert loaded == {module: [] for module in wanted}


OF_THE_SYSTEM = (
    "kestrel_engine/clock.py",
    "kestrel_engine/processes/parent_death.py",
    "kestrel_engine/preprocess/processes/decoder.py",
    "kestrel_engine/skills/constraints/grammar_text.py",
    "kestrel_grpc/cli/",
)
"""The clock itself, modules that run in child processes, and programs, which measure servers."""


def test_there_is_one_clock():
    """Engine and service go by kestrel_engine.clock, so that tests can move it. Stamps in nanoseconds (``time_ns``) are
    for files and exports."""
    own = re.compile(
        r"\btime\.(monotonic|perf_counter|time|sleep)\b|\bfrom time import|\bdatetime\.(utc)?now\("
    )
    found = [
        name(path)
        for path in SOURCES
        if name(path).startswith(("kestrel_engine", "kestrel_grpc"))
        and not name(path).startswith(OF_THE_SYSTEM)
        and own.search(path.read_text())
    ]
    assert found == []


def test_unfinished_work_is_not_committed():
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    found = [name(p) for p in SOURCES if marker.search(p.read_text())]
    assert found == []


MOST_LINES, MOST_PARAMETERS = 100, 10


def test_functions_are_short_and_take_few_parameters():
    """Kernels are not counted: Triton passes a kernel its values one by one."""
    found = []
    for path in SOURCES:
        if name(path).startswith("kestrel_engine/kernels/"):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = node.args
                taken = [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
                num_parameters = len([each for each in taken if each not in ("self", "cls")])
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES or num_parameters > MOST_PARAMETERS:
                    found.append(f"{name(path)}:{node.name}")
    assert found == []


SLEEP = r"\b(?:time|asyncio)\.sleep\((?!0\))"
WAIT = r"\bwait_for\(.*, |(?:\basyncio\.timeout|\.wait|\.join|\.result|\.settimeout)\((?!0[,)])"
BOUND = r"\b(?:timeout|timeout_s|within_s|after_s)="
SHORT = re.compile(rf"(?:{SLEEP}|{WAIT}|{BOUND})(\d+(?:\.\d+)?)\b")


def test_what_goes_by_the_systems_clock_is_listed_with_its_reason():
    tests = ROOT / "tests"
    found = {
        str(path.relative_to(tests))
        for path in tests.rglob("*.py")
        if "still_clock" not in (text := path.read_text()) and path.name != "test_clock.py"
        if any(float(seconds) < WITHIN_S for seconds in SHORT.findall(text))
    }
    unlisted = {each for each in found if not each.startswith(tuple(WHY))}
    assert not unlisted, "wait for an event (tests/waiting.py), or move a clock (tests/clock.py)"
    assert [each for each in WHY if not any(path.startswith(each) for path in found)] == []
