"""LogWriter: logging never waits; lost records are counted and reported; the end has a time limit."""

import array
import fcntl
import logging
import os
import re
import sys
import termios
import threading
import time
from pathlib import Path

import pytest

from kestrel_engine import clock
from kestrel_grpc.logs import writer as log_writer
from kestrel_grpc.logs.writer import LogWriter
from tests.forking.process import ForkedProcess
from tests.waiting import wait_until

MIB = 1024 * 1024


@pytest.fixture
def logger():
    logger = logging.Logger("a.b")
    yield logger
    for handler in logger.handlers:
        handler.close()


@pytest.fixture
def pipe():
    ends = list(os.pipe())
    yield ends
    for end in ends:
        if end is not None:
            os.close(end)


def writer_of(logger, fd, most_bytes=MIB):
    writer = LogWriter(fd, most_bytes)
    writer.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(writer)
    return writer


def read_all(fd):
    """What is written until the other end is closed."""
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts).decode().splitlines()


def test_all_threads_lines_come_whole_and_each_threads_in_order(logger, tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        writer = writer_of(logger, file.fileno())

        def tell(name):
            for number in range(300):
                logger.info("%s %d", name, number)

        threads = [threading.Thread(target=tell, args=(name,)) for name in "xyz"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 900 and writer.lost == 0
    for name in "xyz":
        assert [line for line in lines if line.startswith(f"a.b: {name} ")] == [
            f"a.b: {name} {number}" for number in range(300)
        ]


def buffered(fd):
    """The bytes that a pipe holds."""
    found = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, found)
    return found[0]


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_what_is_lost_is_told(logger, pipe):
    writer = writer_of(logger, pipe[1], most_bytes=10_000)
    logger.info("x" * 9_000)
    writer.flush()
    for number in range(2000):
        logger.info("%d %s", number, "y" * 100)
        if number % 10 == 0:
            time.sleep(0.001)  # The thread fills the pipe: 64 KiB.
    assert writer.lost > 0
    lost = writer.lost
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(pipe[0])))
    reader.start()
    wait_until(lambda: writer.idle.is_set())
    logger.info("afterwards")
    writer.close()
    os.close(pipe[1])
    pipe[1] = None
    reader.join()
    assert len(lines) == 1 + 2000 - lost + 1 + 1 and writer.lost == lost
    told = [line for line in lines if "lost" in line]
    assert told == [f"kestrel_grpc.logs.writer: {lost} records were lost: the reader was too slow"]
    assert lines[-2:] == [told[0], "a.b: afterwards"], "it is told where it happened"


def test_memory_is_bounded_while_nobody_reads(logger, pipe):
    writer = writer_of(logger, pipe[1], most_bytes=50_000)
    for _ in range(3000):
        logger.info("z" * 100)
        assert writer.held_bytes <= 50_000
    assert writer.lost > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_of_once_there_is_room(logger, tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file, open("/dev/full", "wb", buffering=0) as full:
        fd = os.dup(full.fileno())
        writer = writer_of(logger, fd)
        for _ in range(3):
            logger.info("not told")
        wait_until(lambda: writer.lost == 3)
        logger.info("not told")
        wait_until(lambda: writer.lost == 4)
        os.dup2(file.fileno(), fd)
        logger.info("told")
        writer.close()
        os.close(fd)
    assert path.read_text().splitlines() == [
        "kestrel_grpc.logs.writer: 4 records were lost: No space left on device",
        "a.b: told",
    ]


def test_half_a_line_stays_one_and_counts_as_lost(logger, pipe, tmp_path):
    writer = writer_of(logger, pipe[1])
    logger.info("x" * 60_000)
    writer.flush()
    logger.info("y" * 60_000)
    wait_until(lambda: buffered(pipe[0]) > 60_100)  # The pipe takes the first bytes of it.
    os.close(pipe[0])
    pipe[0] = None
    wait_until(lambda: writer.lost == 1)
    path = tmp_path / "log"
    with path.open("wb") as file:
        os.write(file.fileno(), b"y")
        os.dup2(file.fileno(), pipe[1])
        logger.info("told")
        writer.close()
    told = "kestrel_grpc.logs.writer: 1 records were lost: Broken pipe"
    assert path.read_text().splitlines() == ["y", told, "a.b: told"]


def test_a_pipe_that_does_not_block_is_waited_for_all_the_same(logger, pipe):
    os.set_blocking(pipe[1], False)
    writer = writer_of(logger, pipe[1])
    for _ in range(4):
        logger.info("w" * 40_000)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(read_all(pipe[0])))
    wait_until(lambda: buffered(pipe[0]) > 40_100)
    reader.start()
    writer.close()
    os.close(pipe[1])
    pipe[1] = None
    reader.join()
    assert len(lines) == 4 and writer.lost == 0


def test_an_end_without_a_reader_has_a_bound(logger, pipe, monkeypatch):
    monkeypatch.setattr(log_writer, "FLUSH_S", 0.1)
    writer = writer_of(logger, pipe[1])
    logger.info("v" * 100_000)
    waits, wait = [], clock.wait
    monkeypatch.setattr(clock, "wait", lambda *args: waits.append(args[1]) or wait(*args))
    writer.flush()
    writer.close()
    assert waits == [0.1], "both wait together"


def test_a_record_that_cannot_be_formatted_is_told_with_its_mistake(logger, tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        writer = writer_of(logger, file.fileno())
        logger.info("%d apples", "some")
        logger.info("a lone half \ud800")
        writer.close()
    text = path.read_text()
    assert re.match(r"a record of a\.b cannot be formatted: Traceback", text)
    assert "TypeError" in text and text.endswith("a.b: a lone half \\ud800\n")


def test_processes_that_share_a_pipe_leave_each_others_lines_whole(pipe):
    """What is written at once and is no larger than PIPE_BUF stays together, whoever else writes."""
    names, count = ("one", "two"), 3000
    program = (
        "import logging, sys; from kestrel_grpc.logs.writer import LogWriter; "
        "writer = LogWriter(int(sys.argv[1]), 1 << 24); logger = logging.Logger(''); logger.addHandler(writer); "
        f"[logger.info('%s %d %s', sys.argv[2], n, sys.argv[2] * 30) for n in range({count})]; writer.close()"
    )
    arguments = [[sys.executable, "-c", program, str(pipe[1]), name] for name in names]
    processes = [ForkedProcess(each, pass_fds=(pipe[1],)) for each in arguments]
    os.close(pipe[1])
    pipe[1] = None
    lines = read_all(pipe[0])
    assert [process.wait() for process in processes] == [0, 0]
    wanted = {f"{name} {number} {name * 30}" for name in names for number in range(count)}
    assert len(lines) == len(wanted) and set(lines) == wanted
