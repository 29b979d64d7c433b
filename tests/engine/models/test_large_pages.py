"""Weights in large pages: the same numbers at the same addresses."""

import sys
from pathlib import Path

import pytest
import torch

from kestrel_engine.models.compiled import large_pages


def large_bytes():
    rollup = Path("/proc/self/smaps_rollup").read_text("utf-8")
    return sum(int(line.split()[1]) for line in rollup.splitlines() if "AnonHuge" in line) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the request is Linux's")
def test_numbers_and_addresses_stay(tmp_path):
    weight = torch.arange(4 * large_pages.PAGE_BYTES // 4)
    small = torch.arange(9)
    (tmp_path / "file").write_bytes(bytes(4 * large_pages.PAGE_BYTES))
    mapped = torch.from_file(
        str(tmp_path / "file"), size=4 * large_pages.PAGE_BYTES, dtype=torch.uint8
    )
    address, before = weight.data_ptr(), large_bytes()
    moved = large_pages.move([weight, small, mapped])
    assert weight.data_ptr() == address
    assert torch.equal(weight, torch.arange(len(weight))) and not mapped.any()
    if moved:
        assert large_bytes() >= before + large_pages.PAGE_BYTES
    assert large_pages.move([small]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the request is Linux's")
def test_a_pool_takes_large_pages_where_it_is_written():
    pool = torch.empty(32 * large_pages.PAGE_BYTES, dtype=torch.uint8)
    before = large_bytes()
    large_pages.prefer(pool)
    assert large_bytes() == before
    pool[: 4 * large_pages.PAGE_BYTES] = 1
    permitted = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if permitted.exists() and "[never]" not in permitted.read_text("utf-8"):
        assert before < large_bytes() <= before + 5 * large_pages.PAGE_BYTES
