"""The cache of a node has a limit: the model used least recently makes room, and never one that a process uses."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kestrel_engine import DownloadError
from kestrel_engine.checkpoint.bucket import cache_room
from kestrel_engine.checkpoint.bucket.cache_room import CacheRoom

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")
A, B, C, D = (letter * 40 for letter in "abcd")


@pytest.fixture(autouse=True)
def nothing_in_use(monkeypatch):
    """As in a new process."""
    held: dict[Path, int] = {}
    monkeypatch.setattr(cache_room, "_IN_USE", held)
    yield
    for opened in held.values():
        os.close(opened)


def model(folder: Path, name: str, num_bytes: int, used_at: int) -> Path:
    (made := folder / name).mkdir()
    (made / "model.safetensors").write_bytes(b"x" * num_bytes)
    (folder / "locks").mkdir(exist_ok=True)
    (use := folder / "locks" / f"{name}.use").touch()
    os.utime(use, (used_at, used_at))
    return made


def models(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"locks"}


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    model(tmp_path, A, 400, used_at=3000)
    model(tmp_path, B, 400, used_at=1000)
    model(tmp_path, C, 100, used_at=2000)
    room = CacheRoom(tmp_path, 1000)
    room.make(D, 100)
    assert models(tmp_path) == {A, B, C}, "there was room"
    room.make(D, 500)
    assert models(tmp_path) == {A, C}
    room.make(D, 1000)
    assert not models(tmp_path)
    with pytest.raises(DownloadError, match=r"may hold 0\.00 GiB \(--weights-cache-gib\)"):
        room.make(D, 1001)
    CacheRoom(tmp_path, None).make(D, 10**15)


def test_a_use_makes_a_model_recent(tmp_path: Path) -> None:
    model(tmp_path, A, 400, used_at=1000)
    model(tmp_path, B, 400, used_at=2000)
    CacheRoom(tmp_path, 1000).hold(A)
    for opened in cache_room._IN_USE.values():
        os.close(opened)
    cache_room._IN_USE.clear()
    CacheRoom(tmp_path, 1000).make(D, 500)
    assert models(tmp_path) == {A}


def test_a_model_that_a_process_uses_stays_until_the_process_ends(tmp_path: Path) -> None:
    model(tmp_path, A, 400, used_at=1000)
    model(tmp_path, B, 400, used_at=2000)
    program = (
        "import sys, pathlib; from kestrel_engine.checkpoint.bucket.cache_room import CacheRoom\n"
        f"CacheRoom(pathlib.Path({str(tmp_path)!r}), 1000).hold({A!r})\n"
        "print('holds', flush=True); sys.stdin.read()"
    )
    room = CacheRoom(tmp_path, 1000)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None and user.stdout.readline() == b"holds\n"
        os.utime(tmp_path / "locks" / f"{A}.use", (1000, 1000))
        room.make(D, 500)
        assert models(tmp_path) == {A}
        with pytest.raises(DownloadError, match="raise the limit, or stop servers"):
            room.make(D, 700)
        assert models(tmp_path) == {A}
        user.kill()
    room.make(D, 700)
    assert not models(tmp_path)


def test_what_is_left_of_others_goes_first_and_downloads_stay(tmp_path: Path) -> None:
    model(tmp_path, A, 300, used_at=1000)
    model(tmp_path, f"{B}.damaged-17", 300, used_at=9000)
    model(tmp_path, f"{B}.deleted-18", 100, used_at=9000)
    model(tmp_path, f"{C}.partial", 100, used_at=1)
    (tmp_path / "notes").mkdir()
    room = CacheRoom(tmp_path, 1000)
    room.make(D, 600)
    assert models(tmp_path) == {A, f"{C}.partial", "notes"}
    # Another process downloads C, and will take 500 bytes.
    with room._locked(tmp_path / "locks" / C, wait=False):
        (tmp_path / "locks" / f"{C}.bytes").write_text("500")
        room.make(D, 500)
        assert models(tmp_path) == {f"{C}.partial", "notes"}
        with pytest.raises(DownloadError):
            room.make(D, 501)
    room.make(D, 501)
    assert models(tmp_path) == {"notes"}


def test_many_make_room_at_once(tmp_path: Path) -> None:
    for number in range(20):
        model(tmp_path, f"{number:040x}", 50, used_at=1000 + number)
    names = [f"{number:040x}" for number in range(100, 108)]
    for name in names:
        model(tmp_path, f"{name}.partial", 1, used_at=5000)
    room = CacheRoom(tmp_path, 1000)
    with ThreadPoolExecutor(8) as threads:

        def make(name: str) -> None:
            with room._locked(tmp_path / "locks" / name, wait=False):
                room.make(name, 100)

        list(threads.map(make, names))
    planned = sum(int((tmp_path / "locks" / f"{name}.bytes").read_text()) for name in names)
    assert planned == 800
    left = [name for name in models(tmp_path) if not name.endswith(".partial")]
    assert 0 < len(left) * 50 + planned <= 1000, left
    assert min(left) >= f"{len(left):040x}", "the newest ones are left"
