"""Streams that a closed runtime leaves don't crash the process (pytorch/pytorch#183403)."""

import subprocess
import sys

SCRIPT = """
import gc
import torch
from kestrel_engine.runtime.gpu.streams import own_stream

device = torch.device("cuda:0")
first = own_stream(device)
for _ in range(200):
    kept = [own_stream(device) for _ in range(4)]
    assert first.cuda_stream not in {each.cuda_stream for each in kept}
    del kept
    gc.collect()
del first
gc.collect()
again = own_stream(device)
print("ended")
"""


def test_streams_are_left_and_given_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "ended\n"), ended.stderr
