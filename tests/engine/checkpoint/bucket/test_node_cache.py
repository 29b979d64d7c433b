"""A model in a bucket: uploaded, downloaded once for a node, resumed, checked, read without the right to write."""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kestrel_engine import ConfigError, DownloadError, RuntimeConfig
from kestrel_engine.checkpoint import checksums
from kestrel_engine.checkpoint.bucket.address import BucketAddress, parse_address
from kestrel_engine.checkpoint.catalog import resolve
from kestrel_engine.checkpoint.open import load_weights, open_model
from tests.tiny import TINY

obstore = pytest.importorskip("obstore")

from kestrel_engine.checkpoint.bucket import bucket as bucket_module  # noqa: E402
from kestrel_engine.checkpoint.bucket.bucket import ModelBucket, upload  # noqa: E402
from kestrel_engine.checkpoint.bucket.node_cache import NodeCache  # noqa: E402

ADDRESS = BucketAddress("bucket", "models/one")
FILES = {"model.safetensors": os.urandom(10_000), "config.json": b"{}", "tokenizer.json": b"[]"}


class Counting(ModelBucket):
    """Counts the bytes that are downloaded, and the files that are uploaded."""

    def __init__(self, store):
        super().__init__(ADDRESS, store)
        self.num_bytes, self.sent = 0, []
        self._lock = threading.Lock()

    def download(self, name, part, count=lambda num_bytes: None):
        before = part.stat().st_size if part.exists() else 0
        digest = super().download(name, part, count)
        # Several files are downloaded at once.
        with self._lock:
            self.num_bytes += part.stat().st_size - before
        return digest

    def upload(self, name, *rest):
        super().upload(name, *rest)
        self.sent.append(name)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 1000)


@pytest.fixture
def store():
    return obstore.store.MemoryStore()


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "here"
    folder.mkdir()
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in FILES}


@pytest.fixture
def bucket(store, files):
    made = Counting(store)
    upload(made, files, lambda *values: None)
    return made


def read(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_goes_up_and_comes_down(bucket, tmp_path, store):
    reports = []
    cache = NodeCache(tmp_path / "cache", lambda *values: reports.append(values))
    place = cache.fetch(ADDRESS, bucket)
    sums = bytes(obstore.get(store, checksums.NAME).bytes())
    assert read(place) == {**FILES, checksums.NAME: sums}
    total = sum(map(len, FILES.values()))
    assert bucket.num_bytes == total and reports[-1] == (total, total, str(ADDRESS))
    assert cache.fetch(ADDRESS, bucket) == place and bucket.num_bytes == total
    assert NodeCache(tmp_path / "cache").fetch(ADDRESS, None) == place
    assert [each.name for each in (tmp_path / "cache").iterdir() if ".part" in each.name] == []


def test_an_upload_goes_on_and_leaves_other_models_alone(store, files):
    first = Counting(store)

    def stop(done, total, name):
        if name == "uploading config.json":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload(first, files, stop)
    with pytest.raises(DownloadError, match="its upload has not ended"):
        first.sums()
    again = Counting(store)
    upload(again, files, lambda *values: None)
    assert again.sent == ["config.json", "tokenizer.json", checksums.NAME]
    third = Counting(store)
    upload(third, files, lambda *values: None)
    assert third.sent == []
    files["config.json"].write_bytes(b"{} ")
    with pytest.raises(DownloadError, match=r"another version of it.*new address"):
        upload(third, files, lambda *values: None)


def test_a_download_goes_on_where_it_stopped(bucket, tmp_path):
    cache = NodeCache(tmp_path)
    digest = hashlib.sha256(bucket.sums().encode()).hexdigest()[:40]
    partial = tmp_path / f"{digest}.partial"
    partial.mkdir()
    (partial / "model.safetensors.part").write_bytes(FILES["model.safetensors"][:7_777])
    (partial / "config.json").write_bytes(FILES["config.json"])
    place = cache.fetch(ADDRESS, bucket)
    assert bucket.num_bytes == 10_000 - 7_777 + len(FILES["tokenizer.json"])
    assert {**read(place), checksums.NAME: b""} == {**FILES, checksums.NAME: b""}


def test_what_an_earlier_process_left_damaged_is_downloaded_anew(bucket, tmp_path, caplog):
    digest = hashlib.sha256(bucket.sums().encode()).hexdigest()[:40]
    partial = tmp_path / f"{digest}.partial"
    partial.mkdir()
    for size in (5_000, 20_000):
        (partial / "model.safetensors.part").write_bytes(bytes(size))
        place = NodeCache(tmp_path).fetch(ADDRESS, bucket)
        assert read(place)["model.safetensors"] == FILES["model.safetensors"]
        place.rename(partial)
        (partial / "model.safetensors").unlink()
    (partial / "model.safetensors").write_bytes(FILES["model.safetensors"])
    # A folder that lost a file is replaced.
    place = NodeCache(tmp_path).fetch(ADDRESS, bucket)
    (place / "config.json").unlink()
    assert (NodeCache(tmp_path).fetch(ADDRESS, bucket) / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("model.safetensors", bytes(10_000), "has the SHA-256 .* damaged, or was replaced"),
        ("model.safetensors", b"short", "has the SHA-256"),
        ("model.safetensors", None, "does not exist, but SHA256SUMS lists it"),
        (checksums.NAME, None, "names no model"),
        (checksums.NAME, b"no sums", "line 1 must be a SHA-256"),
        (checksums.NAME, b"", "lists 0 files"),
        (checksums.NAME, b"\xff", "is not text"),
        (checksums.NAME, b"x" * 2_000_000, "more than 1048576"),
        (checksums.NAME, b"0" * 64 + b"  ..\n", "is not the name"),
        (checksums.NAME, b"0" * 64 + b"  ../x\n", "line 1 must be"),
        (checksums.NAME, b"0" * 64 + b"  .part\n", "is not the name"),
    ],
)
def test_a_damaged_model_is_refused_and_never_served(bucket, store, tmp_path, name, data, told):
    obstore.delete(store, name)
    if data is not None:
        obstore.put(store, name, data)
    with pytest.raises(DownloadError, match=told):
        NodeCache(tmp_path).fetch(ADDRESS, bucket)
    assert not [each for each in tmp_path.iterdir() if len(each.name) == 40]


def test_a_bucket_that_does_not_answer(bucket, tmp_path, monkeypatch, caplog):
    cache = NodeCache(tmp_path / "cache")

    def fail(self):
        raise DownloadError("the bucket does not answer")

    with pytest.raises(DownloadError, match=r"not in the cache.*offline"):
        cache.fetch(ADDRESS, None)
    with monkeypatch.context() as patched:
        patched.setattr(Counting, "sums", fail)
        with pytest.raises(DownloadError, match="does not answer"):
            cache.fetch(ADDRESS, bucket)
    place = cache.fetch(ADDRESS, bucket)
    monkeypatch.setattr(Counting, "sums", fail)
    with caplog.at_level(logging.WARNING):
        assert cache.fetch(ADDRESS, bucket) == place
    assert "from the cache" in caplog.text


def test_a_disk_without_space_is_said_before_the_download(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(DownloadError, match=r"no space left.*--cache-dir"):
        NodeCache(tmp_path).fetch(ADDRESS, bucket)
    assert bucket.num_bytes == 0


def test_a_model_beyond_the_caches_limit_is_refused(bucket, tmp_path):
    with pytest.raises(DownloadError, match=r"may hold 0\.00 GiB \(--weights-cache-gib\)"):
        NodeCache(tmp_path, most_bytes=5_000).fetch(ADDRESS, bucket)
    assert bucket.num_bytes == 0


class Usage:
    free = 5_000


def test_several_that_start_at_once_download_once(bucket, tmp_path):
    """Each opens the lock's file itself, as processes do."""
    with ThreadPoolExecutor(8) as threads:
        fetched = [
            threads.submit(NodeCache(tmp_path / "cache").fetch, ADDRESS, bucket) for _ in range(8)
        ]
        assert len({each.result(60) for each in fetched}) == 1
    assert bucket.num_bytes == sum(map(len, FILES.values()))


KILLED = """
import os, sys, obstore
from pathlib import Path
from kestrel_engine.checkpoint.bucket import bucket
from kestrel_engine.checkpoint.bucket.address import BucketAddress
from kestrel_engine.checkpoint.bucket.node_cache import NodeCache
bucket.PIECE_BYTES = 1000
address = BucketAddress("bucket", "models/one")
def report(done, total, name):
    if done > 5_000:
        os.kill(os.getpid(), 9)
NodeCache(Path(sys.argv[2]), report).fetch(
    address, bucket.ModelBucket(address, obstore.store.LocalStore(sys.argv[1]))
)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_what_it_has_and_no_lock(bucket, files, tmp_path):
    folder = files["config.json"].parent
    (folder / checksums.NAME).write_text(bucket.sums())
    words = [sys.executable, "-c", KILLED, folder, tmp_path / "cache"]
    assert subprocess.run([*map(str, words)], timeout=120).returncode == -signal.SIGKILL
    place = NodeCache(tmp_path / "cache").fetch(ADDRESS, bucket)
    assert read(place)["model.safetensors"] == FILES["model.safetensors"]
    assert 0 < bucket.num_bytes < 10_000


def as_nobody(work):
    """Runs ``work`` in a process without the rights of root. Returns what it raised, as text."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        told = ""
        try:
            os.setgid(65534)
            os.setuid(65534)
            work()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        finally:
            os.write(writes, told.encode()[:4000])
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as told:
        text = told.read().decode()
    os.waitpid(child, 0)
    return text


def state(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture
def readable():
    """A folder that every user may read, as what is made in it, unlike pytest's."""
    before = os.umask(0o022)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
    os.umask(before)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without rights")
def test_a_model_is_loaded_from_a_folder_that_may_not_be_written(readable):
    folder = readable / "model"
    shutil.copytree(TINY, folder)
    before = state(readable)

    def load():
        opened = open_model(RuntimeConfig(model_path=str(folder)))
        load_weights(opened, dtype=torch.float32, device="cpu")

    load()  # Imports what the other user may not read.
    assert as_nobody(lambda: (folder / "x").touch()).startswith("PermissionError")
    assert as_nobody(load) == ""
    assert state(readable) == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become a user without rights")
def test_a_user_who_may_not_write_uses_a_model_that_is_there(bucket, readable):
    cache = readable / "cache"
    place = NodeCache(cache).fetch(ADDRESS, bucket)
    before = state(cache)

    class Known(Counting):
        """The child does not use the library, whose threads it does not have."""

        def sums(self):
            return text

    text, known = bucket.sums(), Known(obstore.store.MemoryStore())

    def use():
        assert not os.access(cache, os.W_OK)
        assert NodeCache(cache).fetch(ADDRESS, None) == place
        assert NodeCache(cache).fetch(BucketAddress("bucket", "copy"), known) == place

    assert as_nobody(use) == ""
    assert state(cache) == before
    (place / "config.json").unlink()
    told = as_nobody(lambda: NodeCache(cache).fetch(ADDRESS, known))
    assert "DownloadError" in told and "can't be written" in told and "--cache-dir" in told


def test_names_and_addresses():
    source = resolve("s3://bucket/models/moondream2")
    assert (source.name, source.family) == ("moondream2", "moondream2")
    assert str(source.bucket) == "s3://bucket/models/moondream2"
    assert resolve("moondream3-preview", "s3://bucket/x/").family == "moondream3"
    assert resolve("kestrel-small", "s3://bucket/x").name == "x"
    assert resolve("s3://bucket").name == "bucket"
    for wrong in ("s3://", "s3://B/x", "s3://bucket//x", "s3://bucket/../x", "s3://bucket/x?y"):
        with pytest.raises(ConfigError, match="s3://BUCKET/PREFIX"):
            resolve(wrong)
    with pytest.raises(ConfigError) as error:
        parse_address("model", "s3://key:secret@bucket/x")
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="must not be empty"):
        RuntimeConfig(cache_dir="")
