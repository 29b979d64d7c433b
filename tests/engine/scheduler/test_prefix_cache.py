"""The prefix cache against an independent brute-force model: a set of cached atom tuples."""

import time

import pytest
from hypothesis import strategies as st

from kestrel_engine.scheduler.memory.pages import PagePool
from kestrel_engine.scheduler.memory.prefix_cache import Atom, PrefixCache
from tests.examples import given_examples


def atoms(*keys):
    """Text pages of one page each; a key in capitals is a picture of three pages."""
    return [Atom(key, 3 if key.isupper() else 1) for key in keys]


def filled(num_pages=20):
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool)


def put(pool, cache, namespace, prefix):
    """Computes and inserts a prefix as a sequence would, then lets go of it."""
    pages = pool.allocate(sum(a.num_pages for a in prefix))
    node = cache.insert(namespace, prefix, pages)
    pool.release(pages)
    if node is not None:
        cache.unlock(node)
    return pages


def test_finds_the_longest_prefix_and_its_pages():
    pool, cache = filled()
    pages = put(pool, cache, "n", atoms("P", "a", "b"))
    match = cache.match("n", atoms("P", "a", "c"))
    assert match.pages == pages[:4]
    assert cache.match("n", atoms("a")).node is None
    assert cache.match("m", atoms("P")).node is None
    cache.unlock(match.node)
    cache.check()


def test_inserting_again_keeps_the_first_pages():
    pool, cache = filled()
    first = put(pool, cache, "n", atoms("a", "b"))
    put(pool, cache, "n", atoms("a", "b", "c"))
    assert cache.match("n", atoms("a", "b")).pages == first
    assert cache.num_pages == 3
    assert pool.num_free == 17


def test_an_unlock_too_many_is_noticed():
    pool, cache = filled()
    put(pool, cache, "n", atoms("a"))
    match = cache.match("n", atoms("a"))
    cache.unlock(match.node)
    with pytest.raises(AssertionError, match="once too often"):
        cache.unlock(match.node)


class Model:
    """What must be cached, kept as plainly as possible: every prefix of what was inserted, with its last use."""

    def __init__(self):
        self.prefixes: dict[tuple, int] = {}
        self.locks: list[tuple] = []
        self.tick = 0

    def use(self, path):
        self.tick += 1
        for end in range(2, len(path) + 1):
            self.prefixes[path[:end]] = self.tick

    def longest(self, path):
        end = 1
        while end < len(path) and path[: end + 1] in self.prefixes:
            end += 1
        return path[:end]

    def is_locked(self, path):
        return any(lock[: len(path)] == path for lock in self.locks)

    def leaves(self):
        inner = {p[:-1] for p in self.prefixes}
        return [p for p in self.prefixes if p not in inner and not self.is_locked(p)]

    def evict(self, pages):
        freed = 0
        while freed < pages and self.leaves():
            oldest = min(self.leaves(), key=lambda p: self.prefixes[p])
            del self.prefixes[oldest]
            freed += 3 if oldest[-1].isupper() else 1
        return freed


@given_examples(15, 150, data=st.data())
def test_agrees_with_the_brute_force_model(data):
    pool, cache = filled(60)
    model = Model()
    held = []
    keys = st.lists(st.sampled_from(["a", "b", "c", "P"]), min_size=1, max_size=5)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["insert", "match", "unlock", "evict"]))
        namespace = data.draw(st.sampled_from(["n", "m"]))
        path = (namespace, *data.draw(keys))
        if action == "insert":
            prefix = atoms(*path[1:])
            if sum(a.num_pages for a in prefix) > pool.num_free:
                continue
            put(pool, cache, namespace, prefix)
            model.use(path)
        elif action == "match":
            match = cache.match(namespace, atoms(*path[1:]))
            expected = model.longest(path)
            assert len(list(match.node.path()) if match.node else []) == len(expected) - 1
            if match.node is not None:
                model.use(expected)
                held.append(match.node)
                model.locks.append(expected)
        elif action == "unlock" and held:
            index = data.draw(st.integers(0, len(held) - 1))
            cache.unlock(held.pop(index))
            model.locks.pop(index)
        elif action == "evict":
            count = data.draw(st.integers(1, 6))
            assert cache.evict(count) == model.evict(count)
        cache.check()
        pool.check()
        size = sum(3 if p[-1].isupper() else 1 for p in model.prefixes)
        assert cache.num_pages == size == pool.num_pages - pool.num_free
        free = sum(3 if p[-1].isupper() else 1 for p in model.prefixes if not model.is_locked(p))
        assert cache.num_evictable == free


def test_the_lowest_pages_are_taken_first_in_their_order():
    """Attention on a CPU copies keys and values whose pages are not consecutive."""
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_many_namespaces_are_forgotten_in_linear_time():
    """When each removal went through all namespaces, these took 1.5 s, and four times as many 35 s."""
    count = 8000
    pool = PagePool(count)
    cache = PrefixCache(pool)
    for name in range(count):
        pages = pool.allocate(1)
        node = cache.insert(name, [Atom("the same", 1)], pages)
        assert node is not None
        cache.unlock(node)
        pool.release(pages)
    began = time.process_time()
    assert cache.flush() == count
    assert time.process_time() - began < 0.5
    assert pool.num_free == count
    cache.check()
