"""A model in a bucket of a real server that speaks S3."""

import json

import pytest

from tests.s3_server import BUCKET, start_s3
from tests.service.command_line import here
from tests.tiny import TINY

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
SECRET = "a-secret-that-no-log-shows"


@pytest.fixture(scope="module")
def s3():
    yield from start_s3()


def test_uploads_that_cannot_work_say_why(s3, monkeypatch):
    done = here("download", TINY, "--to", "s3://no-such-bucket/x")
    assert done.returncode == 1 and "the bucket no-such-bucket does not exist" in done.stderr
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    done = here("download", TINY, "--to", f"s3://{BUCKET}/x")
    assert done.returncode == 1 and "http needs AWS_ALLOW_HTTP=true" in done.stderr


def test_a_model_goes_into_a_bucket_and_is_verified_from_it(s3, tmp_path):
    address = f"s3://{BUCKET}/models/kestrel-tiny"
    for _ in range(2):  # The second one finds all files there.
        done = here("download", TINY, "--to", address)
        assert done.returncode == 0, done.stderr
        *files, last = done.stdout.splitlines()
        assert files[0] == f"{address}/model.safetensors"
        assert last == "kestrel-tiny: 4 files, 21.7 MB"
    cache = {"KESTREL_CACHE_DIR": str(tmp_path / "cache")}
    done = here("verify", "--json", "--no-answer", "--model", address, **cache)
    assert done.returncode == 0, done.stderr + done.stdout
    told = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert "SHA256SUMS" in told["checksums"]["message"]
    assert {finding["status"] for finding in told.values()} == {"ok"}
    # The bucket is not needed any more.
    done = here("verify", "--no-answer", "--model", address, "--offline", **cache)
    assert done.returncode == 0, done.stderr
    done = here("download", f"s3://{BUCKET}/models/absent", **cache)
    assert done.returncode == 1 and "names no model" in done.stderr
    done = here("download", "s3://no-such-bucket/x", **cache)
    assert done.returncode == 1 and "s3://no-such-bucket/x" in done.stderr
    assert SECRET not in done.stderr
