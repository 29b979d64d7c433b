"""A cache on the disk has a limit: what was used least recently makes room, and never what a process uses."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kestrel_engine.disk_cache import DiskCache, NoRoom

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")
A, B, C, D = (letter * 40 for letter in "abcd")


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
    room = DiskCache(tmp_path, 1000)
    room.make_room(D, 100)
    assert models(tmp_path) == {A, B, C}, "there was room"
    room.make_room(D, 500)
    assert models(tmp_path) == {A, C}
    room.make_room(D, 1000)
    assert not models(tmp_path)
    with pytest.raises(NoRoom) as full:
        room.make_room(D, 1001)
    assert full.value.used == 0
    DiskCache(tmp_path, None).make_room(D, 10**15)


def test_a_use_makes_a_model_recent(tmp_path: Path) -> None:
    model(tmp_path, A, 400, used_at=1000)
    model(tmp_path, B, 400, used_at=2000)
    os.close(DiskCache(tmp_path, 1000).hold(A))
    DiskCache(tmp_path, 1000).make_room(D, 500)
    assert models(tmp_path) == {A}


def test_a_model_that_a_process_uses_stays_until_the_process_ends(tmp_path: Path) -> None:
    model(tmp_path, A, 400, used_at=1000)
    model(tmp_path, B, 400, used_at=2000)
    program = (
        "import sys, pathlib; from kestrel_engine.disk_cache import DiskCache\n"
        f"DiskCache(pathlib.Path({str(tmp_path)!r}), 1000).hold({A!r})\n"
        "print('holds', flush=True); sys.stdin.read()"
    )
    room = DiskCache(tmp_path, 1000)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None and user.stdout.readline() == b"holds\n"
        os.utime(tmp_path / "locks" / f"{A}.use", (1000, 1000))
        room.make_room(D, 500)
        assert models(tmp_path) == {A}
        with pytest.raises(NoRoom):
            room.make_room(D, 700)
        assert models(tmp_path) == {A}
        user.kill()
    room.make_room(D, 700)
    assert not models(tmp_path)


def test_what_is_left_of_others_goes_first_and_downloads_stay(tmp_path: Path) -> None:
    model(tmp_path, A, 300, used_at=1000)
    model(tmp_path, f"{B}.deleted-17", 300, used_at=9000)
    model(tmp_path, f"{B}.deleted-18", 100, used_at=9000)
    model(tmp_path, f"{C}.partial", 100, used_at=1)
    (tmp_path / "notes").mkdir()
    room = DiskCache(tmp_path, 1000)
    room.make_room(D, 600)
    assert models(tmp_path) == {A, f"{C}.partial", "notes"}
    # Another process downloads C, and will take 500 bytes.
    with room.downloading(C):
        (tmp_path / "locks" / f"{C}.bytes").write_text("500")
        room.make_room(D, 500)
        assert models(tmp_path) == {f"{C}.partial", "notes"}
        with pytest.raises(NoRoom):
            room.make_room(D, 501)
    room.make_room(D, 501)
    assert models(tmp_path) == {"notes"}


def test_many_make_room_at_once(tmp_path: Path) -> None:
    for number in range(20):
        model(tmp_path, f"{number:040x}", 50, used_at=1000 + number)
    names = [f"{number:040x}" for number in range(100, 108)]
    for name in names:
        model(tmp_path, f"{name}.partial", 1, used_at=5000)
    room = DiskCache(tmp_path, 1000)
    with ThreadPoolExecutor(8) as threads:

        def make(name: str) -> None:
            with room.downloading(name):
                room.make_room(name, 100)

        list(threads.map(make, names))
    planned = sum(int((tmp_path / "locks" / f"{name}.bytes").read_text()) for name in names)
    assert planned == 800
    left = [name for name in models(tmp_path) if not name.endswith(".partial")]
    assert 0 < len(left) * 50 + planned <= 1000, left
    assert min(left) >= f"{len(left):040x}", "the newest ones are left"


def test_a_lock_of_a_file_that_is_deleted_meanwhile_is_taken_again(tmp_path: Path) -> None:
    """Locks go with their entries. Who waited for one of them has the lock of the new file."""
    model(tmp_path, A, 400, used_at=1000)
    cache = DiskCache(tmp_path, 1000)
    reader = cache.hold(A)
    (tmp_path / "locks" / f"{A}.use").unlink()
    other = cache.hold(A)
    os.close(reader)
    with pytest.raises(NoRoom):
        cache.make_room(D, 700)
    os.close(other)
    cache.make_room(D, 700)
    assert not models(tmp_path)
    assert {path.name for path in (tmp_path / "locks").iterdir()} == {"room", f"{D}.bytes"}


def test_what_ended_processes_left_is_swept_and_what_runs_stays(tmp_path: Path) -> None:
    model(tmp_path, A, 1, used_at=1000)
    model(tmp_path, f"{B}.partial", 1, used_at=1000)
    model(tmp_path, f"{C}.partial", 1, used_at=1000)
    model(tmp_path, f"{D}.deleted-1", 1, used_at=1000)
    cache = DiskCache(tmp_path, 1000)
    with cache.downloading(B):
        cache.sweep()
        assert models(tmp_path) == {A, f"{B}.partial"}
    cache.sweep()
    assert models(tmp_path) == {A}
