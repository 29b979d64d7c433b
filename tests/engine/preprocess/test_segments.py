"""Segments: memory that a decoder fills and this process maps."""

import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kestrel_engine.preprocess.processes.segments import (
    map_segment,
    new_segment,
    read_segment,
    write_segment,
)


@pytest.fixture
def segment():
    descriptor = new_segment()
    yield descriptor
    os.close(descriptor)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("kestrel-image")


def test_what_one_side_writes_the_other_reads(segment):
    data = np.arange(60, dtype=np.uint8)
    write_segment(segment, data)
    found = np.empty((3, 4, 5), np.uint8)
    assert read_segment(segment, found)
    assert np.array_equal(found.reshape(-1), data)
    assert np.array_equal(map_segment(segment, (2, 5)), data[:10].reshape(2, 5))


def test_a_segment_of_fewer_bytes_is_refused(segment):
    write_segment(segment, bytes(59))
    assert not read_segment(segment, np.empty(60, np.uint8))
    with pytest.raises(ValueError, match="less than"):
        map_segment(segment, (60,))


@pytest.mark.skipif(sys.platform != "linux", reason="segments are mapped on Linux")
def test_a_mapped_segment_stays_as_large_as_it_is(segment):
    """To read memory that the other side has taken away would end the process."""
    os.ftruncate(segment, 200_000)
    array = map_segment(segment, (200_000,))
    for size in (0, 199_999):
        with pytest.raises(PermissionError):
            os.ftruncate(segment, size)
    assert not array.any()


@pytest.mark.skipif(sys.platform != "linux", reason="segments are mapped on Linux")
def test_the_memory_lives_as_long_as_its_arrays():
    before, descriptor = mappings(), new_segment()
    write_segment(descriptor, bytes(range(200)) * 1000)
    array = map_segment(descriptor, (200_000,))
    os.close(descriptor)
    part = array[100:200].reshape(10, 10)
    del array
    assert mappings() == before + 1
    assert part[0].tolist() == list(range(100, 110))
    del part
    assert mappings() == before


def test_images_of_many_sizes_leave_nothing_for_the_garbage_collector(segment):
    os.ftruncate(segment, 300_000)
    gc.collect()
    gc.disable()
    try:
        for size in range(299_000, 299_100):
            map_segment(segment, (size,))
        assert gc.collect() < 100
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="segments are mapped on Linux")
def test_small_images_are_copied_because_a_process_has_few_mappings(segment):
    write_segment(segment, bytes(range(200)))
    before = mappings()
    array = map_segment(segment, (10, 20))
    assert mappings() == before
    assert array.reshape(-1).tolist() == list(range(200))
    write_segment(segment, bytes(200))
    assert array[0, 1] == 1, "the decoder cannot change it any more"
