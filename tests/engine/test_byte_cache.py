"""Against a plain model: a list of keys with their sizes, the least recently used first."""

from hypothesis import given
from hypothesis import strategies as st

from kestrel_engine.byte_cache import ByteCache

LIMIT = 10
STEPS = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, LIMIT + 2)), max_size=40)


@given(STEPS)
def test_the_least_recently_used_go_first(steps):
    """Each step finds a key, or keeps a value of a size."""
    cache: ByteCache[int, int] = ByteCache(LIMIT)
    model: list[tuple[int, int, int]] = []
    for number, (key, size) in enumerate(steps):
        there = [one for one in model if one[0] == key]
        if size is None:
            assert cache.find(key) == (there[0][1] if there else None)
            model = [one for one in model if one[0] != key] + there
        else:
            cache.keep(key, number, size)
            if size <= LIMIT:
                model = [*(one for one in model if one[0] != key), (key, number, size)]
                while sum(one[2] for one in model) > LIMIT:
                    model.pop(0)
        assert cache.num_bytes == sum(one[2] for one in model) <= LIMIT
        assert len(cache) == len(model)
    cache.flush()
    assert (len(cache), cache.num_bytes) == (0, 0)
