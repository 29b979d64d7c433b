"""The house rules that a machine can check (docs/architecture.md); import rules are import-linter's."""

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kestrel_engine

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "kestrel_engine",
    ROOT / "kestrel_grpc",
    ROOT / "clients/python/kestrel_client",
    ROOT / "training",
]
SOURCES = sorted(p for package in PACKAGES for p in package.rglob("*.py") if "_pb" not in p.parts)


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


def test_there_is_something_to_check():
    assert len(SOURCES) > 60


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_owns_one_thing(path):
    assert path.stem not in {"utils", "helpers", "common", "manager", "misc"}
    if path.read_text().strip():
        assert ast.get_docstring(parsed(path)), "a module says what it owns"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "kestrel_grpc").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_service_uses_public_names_of_the_engine_only(path):
    for module, names in imports(path):
        if module.split(".")[0] == "kestrel_engine":
            assert module == "kestrel_engine", f"{module} is not public"
            assert set(names) <= set(kestrel_engine.__all__), names


def test_every_public_name_exists():
    for name in kestrel_engine.__all__:
        assert getattr(kestrel_engine, name) is not None


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("kestrel_engine", {"torch", "grpc"}),
        ("kestrel_engine.scheduler.scheduler", {"torch"}),
        ("kestrel_engine.runtime.fake", {"torch"}),
        ("kestrel_grpc", {"torch", "grpc", "kestrel_engine"}),
        ("kestrel_grpc.cli.serve", {"torch", "grpc"}),
        ("kestrel_client", {"torch", "numpy", "PIL", "kestrel_engine"}),
    ],
)
def test_importing_loads_no_more_than_it_must(module, absent):
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert not absent & set(done.stdout.split())


def test_unfinished_work_is_not_committed():
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b")
    found = [f"{p.relative_to(ROOT)}" for p in SOURCES if marker.search(p.read_text())]
    assert found == []
