"""A server that speaks S3, of the package moto, in a process of its own."""

import importlib.util
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tests.ports import free_port
from tests.waiting import wait_until

BUCKET = "kestrel"


def start_s3() -> Iterator[str]:
    """Yields the server's address, and sets the variables that its clients need. Skips without the packages."""
    missing = [
        name for name in ("moto", "flask", "flask_cors") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    port = free_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-log-shows",
    }
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = variables["AWS_ENDPOINT_URL"]

        def has_bucket() -> bool:
            made = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
            try:
                urllib.request.urlopen(made, timeout=60).close()
            except urllib.error.HTTPError as error:
                error.close()
                raise
            except OSError:
                assert server.poll() is None
                return False
            return True

        wait_until(has_bucket)
        with pytest.MonkeyPatch.context() as patched:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patched.delenv(name)
            for name, value in variables.items():
                patched.setenv(name, value)
            yield address
    finally:
        server.kill()
        server.wait(60)
