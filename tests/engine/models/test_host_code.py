"""Compiled functions for a CPU: what they do in a fork of a process that has used them."""

import os
import subprocess
import sys

import pytest

from kestrel_engine.models.compiled import few_rows

pytestmark = pytest.mark.skipif(
    not few_rows.available(), reason="needs a processor of the kind x86-64, Linux and llvmlite"
)

PROGRAM = """
import os
import torch
from kestrel_engine.models.compiled import few_rows

torch.set_num_threads(2)
values = torch.linspace(-1, 1, 65 * 64).sin().view(65, 64).bfloat16()
before = few_rows.product("bf16", values[:1], values[1:], None, 32)
child = os.fork()
if not child:
    after = few_rows.product("bf16", values[:1], values[1:], None, 32)
    os._exit(0 if torch.equal(after, before) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_computes_without_the_threads_that_it_does_not_have():
    environ = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "0\n", done.stderr
