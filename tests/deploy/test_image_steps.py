"""The image of a CPU server is made without Docker, step by step. Its server becomes healthy and answers curl."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.deploy.image_steps import ImageSteps
from tests.deploy.test_wheels import checkout

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def can_mount(folder: Path) -> bool:
    """Whether this process may mount an overlay of the root."""
    for name in ("upper", "work", "root"):
        (folder / name).mkdir(parents=True)
    options = f"lowerdir=/,upperdir={folder}/upper,workdir={folder}/work"
    mount = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options]
    return not subprocess.run(
        [*mount, folder / "root"], capture_output=True, check=False
    ).returncode


@pytest.mark.timeout(900)
def test_the_steps_of_the_image_make_a_server_that_becomes_healthy(tmp_path: Path) -> None:
    if sys.platform != "linux" or os.geteuid() or not can_mount(tmp_path / "try"):
        pytest.skip("needs root, and overlays of the root's file system")
    if torch.version.cuda is not None:
        pytest.skip("pip would download CUDA's libraries")
    (tmp_path / "context").mkdir()
    image = ImageSteps(ROOT / "deploy/Dockerfile", checkout(tmp_path / "context"), {})
    start, health = shlex.join(image.start), shlex.join(image.health)
    # The port of the Dockerfile may be taken here.
    then = f"""
      echo "runs as $(id -u) in $(pwd)"
      export KESTREL_LISTEN=unix:/tmp/kestrel.sock KESTREL_INSECURE_LISTEN=on
      export KESTREL_HTTP_LISTEN=unix:/tmp/http.sock KESTREL_THREADS=1 KESTREL_DRAIN_DELAY=0
      {start} & server=$!
      until {health}; do kill -0 $server; sleep 2; done
      python -c "import kestrel_grpc; print(kestrel_grpc.__file__)"
      image=$(python -c "from kestrel_client.commands import DEMO_IMAGE; print(DEMO_IMAGE)")
      printf '{{"image_url": "data:image/jpeg;base64,%s", "question": "How many green crescents are there?"}}' \
        "$(base64 -w0 "$image")" > /tmp/query.json
      curl -sf --unix-socket /tmp/http.sock -H 'Content-Type: application/json' -d @/tmp/query.json http://localhost/v1/query
      echo
      kill -TERM $server; wait $server; echo "ended with $?"
    """
    done = image.run(tmp_path / "stages", then)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "runs as 10001 in /home/kestrel" in lines and lines[-1] == "ended with 0"
    assert "kestrel-grpc ready: kestrel-small on cpu" in done.stdout
    assert any(line.startswith("{") and '"answer":"' in line.replace(" ", "") for line in lines)
    assert any(line.startswith("/opt/kestrel/lib/python3") for line in lines)
    assert not Path("/opt/kestrel").exists() and not Path("/tmp/kestrel.sock").exists()
