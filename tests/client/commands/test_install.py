"""What ``pip install './clients/python[cli]'`` brings. It asks an index for packages."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST_BYTES = 150_000_000
BROUGHT = {
    *("googleapis-common-protos", "grpcio", "kestrel-client", "numpy"),
    *("pillow", "protobuf", "shtab", "tqdm", "typing-extensions"),
}
LISTED = """
import json
from importlib import metadata
print(json.dumps({d.name.lower().replace("_", "-"): sum(f.size or 0 for f in d.files or ())
                  for d in metadata.distributions()}))
"""


@pytest.mark.slow
def test_the_commands_come_in_an_environment_without_torch(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python, kestrel = tmp_path / "bin/python", tmp_path / "bin/kestrel"
    installing = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*installing, "-c", "constraints.txt", "./clients/python[cli]"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if "No matching distribution" in done.stderr or "Failed to establish" in done.stderr:
        pytest.skip("no index of packages")
    assert done.returncode == 0, done.stderr
    listed = subprocess.run([python, "-c", LISTED], check=True, capture_output=True, text=True)
    sizes = json.loads(listed.stdout)
    brought = set(sizes) - {"pip", "setuptools"}
    print(f"{len(brought)} packages, {sum(sizes[name] for name in brought):,} bytes")
    assert brought == BROUGHT
    assert sum(sizes[name] for name in brought) < MOST_BYTES
    for words in (["--help"], ["query", "--help"], ["bench", "--help"], ["eval", "--help"]):
        told = subprocess.run([kestrel, *words], check=True, capture_output=True, text=True)
        assert told.stdout.startswith("usage: kestrel")
    alone = subprocess.run(
        [kestrel, "health", "--server", "127.0.0.1:1", "--wait", "0.1"],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 1 and "server 127.0.0.1:1 is unavailable" in alone.stderr
