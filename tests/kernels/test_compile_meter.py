"""What Triton's compiler tells is counted, and whoever listened before still hears it."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kestrel_engine.kernels import kernel_cache
from kestrel_engine.kernels.kernel_cache import CompileMeter, watch_compiler
from kestrel_engine.types.info import CompileCounts


def add_one(pointer, BLOCK: tl.constexpr):
    places = tl.arange(0, BLOCK)
    tl.store(pointer + places, tl.load(pointer + places) + 1)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """No meter, a listener of somebody else's, an empty folder of compiled kernels."""
    heard = []
    monkeypatch.setattr(kernel_cache, "_meter", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda **told: heard.append(told["cache_hit"])
    yield heard
    knobs.compilation.listener = before


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_found_the_next_time():
    """In a process of its own: where kernels are interpreted, Triton's language is no longer the compiler's."""
    chosen = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-q",
        f"{__file__}::test_in_a_process_of_its_own",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        env=os.environ | {"KESTREL_TEST_COMPILER": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif("KESTREL_TEST_COMPILER" not in os.environ, reason="run by the test above")
def test_in_a_process_of_its_own(fresh):
    meter = watch_compiler()
    assert watch_compiler() is meter
    assert meter.counts == CompileCounts()
    source = ASTSource(JITFunction(add_one), {"pointer": "*fp32", "BLOCK": "constexpr"}, {(1,): 64})
    for _ in range(2):
        try:
            triton.compile(source, target=GPUTarget("cuda", 80, 32))
        except (RuntimeError, OSError) as error:
            pytest.skip(f"no compiler for another card here: {error}")
    assert (meter.counts.compiled, meter.counts.cached) == (1, 1)
    assert 0 < meter.counts.seconds < 60
    assert fresh == [False, True]


def test_only_compiling_while_serving_is_worth_a_warning(caplog):
    meter = CompileMeter()
    with caplog.at_level(logging.WARNING):
        meter.note("early", 1.0, cached=False)
        meter.note_serving(threading.current_thread())
        meter.note("found", 0.01, cached=True)
        # Another model is loaded meanwhile.
        loading = threading.Thread(
            target=meter.note, args=("another", 1.0), kwargs={"cached": False}
        )
        loading.start()
        loading.join()
        assert caplog.text == ""
        meter.note("late", 2.5, cached=False)
    assert "kernel late was compiled while serving, in 2.50 s" in caplog.text
    assert meter.counts == CompileCounts(compiled=3, cached=1, seconds=pytest.approx(4.51))
