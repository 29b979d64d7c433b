"""No two owners have the same stream, although torch deals its streams out in turn."""

from __future__ import annotations

import gc
import itertools
from typing import ClassVar

import pytest
import torch

from kestrel_engine.runtime.gpu import streams

CARD = torch.device("cuda:0")


class Dealt:
    """A stream as torch deals it: the 32 handles of a priority return."""

    counts: ClassVar[dict[int, itertools.count[int]]] = {}

    def __init__(self, device: torch.device, priority: int) -> None:
        count = self.counts.setdefault(priority, itertools.count())
        self.device, self.cuda_stream = device, 1000 * abs(priority) + next(count) % 32


def test_streams_in_use_are_not_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Dealt)
    kept = [streams.own_stream(CARD) for _ in range(20)]
    for _ in range(40):  # Those of others, which are not kept.
        streams.own_stream(CARD)
    kept += [streams.own_stream(CARD) for _ in range(12)]
    assert len({each.cuda_stream for each in kept}) == 32
    assert streams.own_stream(CARD, priority=-1).cuda_stream >= 1000
    with pytest.raises(RuntimeError, match="all 32 streams of priority 0 of cuda:0"):
        streams.own_stream(CARD)
    freed = kept.pop(7).cuda_stream
    gc.collect()
    assert streams.own_stream(CARD).cuda_stream == freed


def test_a_free_stream_that_was_used_comes_before_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Dealt)
    kept = [streams.own_stream(CARD, priority=-5) for _ in range(3)]
    for _ in range(10):
        left = kept.pop(1).cuda_stream
        gc.collect()
        kept.append(streams.own_stream(CARD, priority=-5))
        assert kept[-1].cuda_stream == left
