"""Weights in large pages: the same numbers at the same addresses."""

import sys
from pathlib import Path

import pytest
import torch

from kestrel_engine.models.compiled import large_pages


def prefers_large_pages(address):
    """Whether the mapping of ``address`` asks for large pages. It gets them if the machine has such memory free."""
    within = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        if " " in line and "-" in (place := line.split()[0]):
            begin, end = (int(number, 16) for number in place.split("-"))
            within = begin <= address < end
        if within and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="the request is Linux's")
def test_numbers_and_addresses_stay(tmp_path):
    weight = torch.arange(4 * large_pages.PAGE_BYTES // 4)
    small = torch.arange(9)
    (tmp_path / "file").write_bytes(bytes(4 * large_pages.PAGE_BYTES))
    mapped = torch.from_file(
        str(tmp_path / "file"), size=4 * large_pages.PAGE_BYTES, dtype=torch.uint8
    )
    address = weight.data_ptr()
    moved = large_pages.move([weight, small, mapped])
    assert 0 <= moved <= 2, "the weight and the file, if memory is free"
    assert weight.data_ptr() == address
    assert torch.equal(weight, torch.arange(len(weight))) and not mapped.any()
    assert large_pages.move([small]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the request is Linux's")
def test_a_pool_asks_for_large_pages():
    pool = torch.empty(32 * large_pages.PAGE_BYTES, dtype=torch.uint8)
    middle = pool.data_ptr() + 16 * large_pages.PAGE_BYTES
    assert not prefers_large_pages(middle)
    large_pages.prefer(pool)
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert prefers_large_pages(middle)
