"""The device's page tables follow the rows, and only what changed is sent."""

import random

import pytest

from kestrel_engine.runtime.gpu.state.sequence_state import SequenceIndices, TableUpdates
from kestrel_engine.types.step import Row


def row(sequence_id, *pages):
    return Row(sequence_id, (1,), 0, tuple(pages), None)


def apply(table, updates):
    for index, page in zip(updates.indices, updates.pages, strict=True):
        table[index] = page


def test_a_grown_table_sends_only_its_new_pages():
    indices = SequenceIndices(2, max_pages=8)
    first, second, third = TableUpdates(), TableUpdates(), TableUpdates()
    index = indices.assign(row(7, 4, 5), 0, first)
    assert indices.assign(row(7, 4, 5), 1, second) == index
    assert indices.assign(row(7, 4, 5, 9), 2, third) == index
    assert first.pages == [4, 5]
    assert second.pages == []
    assert third.pages == [9] and third.indices == [index * 8 + 2]


def test_a_table_with_other_pages_is_sent_whole():
    indices = SequenceIndices(2, max_pages=8)
    indices.assign(row(7, 4, 5, 6), 0, TableUpdates())
    updates = TableUpdates()
    indices.assign(row(7, 4, 8), 1, updates)
    assert updates.pages == [4, 8]


def test_an_index_that_a_step_holds_is_kept_however_many_steps_follow():
    indices = SequenceIndices(2, max_pages=4, keep=2)
    held = indices.assign(row(1, 1), 0, TableUpdates())
    indices.hold([held], 0)
    other = indices.assign(row(2, 2), 10, TableUpdates())
    assert indices.assign(row(3, 3), 20, TableUpdates()) == other
    indices.unhold(0)
    indices.unhold(99)
    assert indices.assign(row(4, 4), 21, TableUpdates()) == held


def test_indices_in_use_are_never_reassigned():
    indices = SequenceIndices(1, max_pages=4, keep=2)
    indices.assign(row(1, 1), 5, TableUpdates())
    with pytest.raises(AssertionError, match="were used within"):
        indices.assign(row(2, 2), 6, TableUpdates())


def test_random_histories_leave_the_device_with_the_true_tables():
    rng = random.Random(11)
    indices = SequenceIndices(6, max_pages=12, keep=1)
    device = [-1] * (6 * 12)
    tables: dict[int, tuple[int, ...]] = {}
    for step in range(2000):
        updates = TableUpdates()
        running = rng.sample(range(9), 3)
        placed = {}
        for sequence_id in running:
            table = tables.get(sequence_id, ())
            choice = rng.random()
            if choice < 0.3 or not table:
                table = tuple(rng.sample(range(100), rng.randint(1, 11)))
            elif choice < 0.7 and len(table) < 12:
                table = (*table, rng.randrange(100))
            tables[sequence_id] = table
            placed[sequence_id] = indices.assign(row(sequence_id, *table), step, updates)
        apply(device, updates)
        assert len(set(placed.values())) == 3
        for sequence_id, index in placed.items():
            table = tables[sequence_id]
            assert tuple(device[index * 12 : index * 12 + len(table)]) == table
        if rng.random() < 0.2:
            ended = rng.choice(running)
            indices.release(ended)
            tables.pop(ended)
