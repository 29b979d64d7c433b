import pytest

from kestrel_engine.fair_queue import FairQueue


def test_principals_take_turns_and_cheap_comes_first():
    queue: FairQueue[str] = FairQueue()
    for name, principal, rank in (
        ("a3", "a", 3),
        ("a1", "a", 1),
        ("a2", "a", 2),
        ("b9", "b", 9),
        ("c5", "c", 5),
        ("b8", "b", 8),
    ):
        queue.push(name, principal, rank)
    assert (len(queue), queue.peek()) == (6, "a1")
    assert [queue.pop() for _ in range(3)] == ["a1", "b8", "c5"]
    queue.push("d", "d", 0)
    assert [queue.pop() for _ in range(4)] == ["a2", "b9", "d", "a3"]
    assert queue.peek() is None
    with pytest.raises(KeyError):
        queue.pop()


def test_an_item_is_removed():
    queue: FairQueue[str] = FairQueue()
    for name in ("a1", "a2", "a3", "b1"):
        queue.push(name, name[0], 0)
    queue.remove("a2", "a")
    queue.remove("b1", "b")
    queue.remove("a1", "c")
    assert [queue.pop() for _ in range(len(queue))] == ["a1", "a3"]
