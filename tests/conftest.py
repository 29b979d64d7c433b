"""Fixtures that every part of the suite may use, and how pytest-xdist shares the tests among its processes."""

import gc
import logging
import os
import shlex
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

# One thread for each operator: test processes run side by side. Torch reads the variable when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests import clock
from tests.forking.process import start_fork_server
from tests.shell import forget_the_shell
from tests.tiny import VARIABLES

FORKING = Path(__file__).parent / "forking"

forget_the_shell(os.environ)
os.environ |= VARIABLES

# Every process keeps what it compiles, whatever the shell says: otherwise each process compiles all modules again, and
# pytest rewrites the tests again. That took 15 s for each process that collects.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

LONG = (
    *("http/real_clients/test_real_clients", "abuse/test_attacks", "golden", "equality", "abuse"),
    *("service/cli/test_commands", "docs", "tools", "deploy", "cluster"),
    *("engine/preprocess/pool", "engine/runtime", "gpu", "training"),
    *("engine/scheduler", "engine/preprocess/test_exact_resize", "service", "benchmarks"),
    *("simulation", "engine/adapters", "engine/confinement"),
)
"""Folders and files whose tests take longest. They start first, so that the processes end at about the same time. Those
that compute and those that wait start together."""

SLOW = (
    *("abuse/processes", "abuse/connections/test_flood", "abuse/test_shares", "equality", "tools"),
    *("deploy/test_haproxy", "cluster/test_server", "service/clients/test_directory"),
    *("service/clients/test_several_servers", "service/images/test_memory"),
    "engine/confinement/test_formats",
)
"""Folders and files of slow tests: processes that are killed, other programs, and mixtures of what is tested alone."""


def pytest_configure(config: pytest.Config) -> None:
    # The process that only hands out tests needs neither torch nor kernels: its workers start seconds earlier.
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        if sys.platform == "linux":
            start_fork_server()  # One for all workers, which find it by their environment.
        return
    import torch
    from torch.testing import _comparison

    from kestrel_grpc.process.interpreter import GC_THRESHOLDS

    gc.set_threshold(*GC_THRESHOLDS)
    # Here no tensor is distributed. To see that, torch would import sympy and more, for a second in each process.
    _comparison._HAS_DTENSOR = False
    # pytest adds handlers to every logger that does not propagate, six times a test. Torch has forty.
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
    if not torch.cuda.is_available():
        # Triton reads it when a kernel is defined: here its kernels run on CPU tensors, by interpretation.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        with suppress(ImportError):
            from triton.runtime import interpreter

            from tests.interpreter.quicken import quicken

            quicken(interpreter)


def pytest_collection_finish() -> None:
    # What was imported and collected stays until the end. A collection of garbage need not visit it, which takes 0.2 s.
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # Before tests are selected by their marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(value in mark.args for mark in item.iter_markers("slow_with") for value in values):
            item.add_marker("slow")
        if item.nodeid.removeprefix("tests/").startswith(SLOW):
            item.add_marker("slow")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            # Installing packages took 300 s on busy cores.
            item.add_marker(pytest.mark.timeout(900))

    def rank(item: pytest.Item) -> int:
        place = item.nodeid.removeprefix("tests/")
        return next((i for i, start in enumerate(LONG) if place.startswith(start)), len(LONG))

    # By path within a rank: every process must have the same order, whichever way it collected.
    items.sort(key=lambda item: (rank(item), item.path.parts))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was skipped: a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each process of pytest-xdist collects the files of a folder in another order: forwards, backwards, or from
    another file on. So each finds many files compiled by the others."""
    report = yield
    given = getattr(collector.config, "workerinput", {"workerid": "gw0", "workercount": 1})
    if isinstance(collector, pytest.Directory) and report.result:
        number, found = int(given["workerid"].removeprefix("gw")), report.result
        first = (number // 2) * 2 * len(found) // (given["workercount"] + 1) % len(found)
        report.result = [*found[first:], *found[:first]][:: -1 if number % 2 else 1]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """The processes that run tests are forks, which have imported torch and all else that takes seconds."""
    if sys.platform == "linux":
        for spec in specs:
            spec.python = shlex.join([sys.executable, str(FORKING / "worker.py")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, a file's tests run in one process, as they share fixtures. So do the golden tests, as
    they share models whose images take seconds to encode, and the tests of tools, as they share a server."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((room for room in ("tests/golden/", "tests/tools/") if room in file), file)

    return Files(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture
async def still_clock() -> AsyncIterator[clock.StillClock]:
    """Time stands still until the test or the event loop moves it."""
    with clock.still() as still:
        yield still


@pytest.fixture
async def moved_clock() -> AsyncIterator[clock.MovedClock]:
    """Time runs, and the test moves it forward."""
    with clock.moved() as moved:
        yield moved


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day stands at ten o'clock until the test changes the one item, the seconds since 1970. Otherwise a
    budget's day or minute could end while the test runs."""
    now = [10 * 3600.0]
    monkeypatch.setattr(clock.clock, "wall", lambda: now[0])
    return now


@pytest.fixture
def checked_addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails tests whose interpreted kernels access what their arguments do not cover."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime import interpreter

        from tests.addresses import check_addresses

        check_addresses(interpreter, request.module, monkeypatch)


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From "md2" or "md3" to that golden model's checkpoint folder, unpacked once a session. Don't write to it."""
    from tests.golden.checkpoint import unpack

    folders: dict[str, Path] = {}

    def folder(model: str) -> Path:
        if model not in folders:
            folders[model] = unpack(model, tmp_path_factory.mktemp("golden") / model)
        return folders[model]

    return folder


@pytest.fixture(scope="session")
def golden_images() -> Path:
    """The folder of the golden images."""
    from tests.golden.checkpoint import DATA

    return DATA / "images"
