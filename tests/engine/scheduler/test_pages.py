import pytest
from hypothesis import strategies as st

from kestrel_engine.scheduler.memory.pages import PagePool
from tests.examples import given_examples


def test_allocates_each_page_once_and_frees_it():
    pool = PagePool(4)
    first, second = pool.allocate(3), pool.allocate(1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert pool.num_free == 0
    pool.release(first)
    pool.check()
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == sorted(first)


def test_a_shared_page_is_freed_by_its_last_user():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.references(pages[0]) == 1
    assert pool.num_free == 1
    pool.release(pages)
    pool.check()
    assert pool.num_free == 2


def test_refuses_what_would_corrupt_the_pool():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="2 pages free"):
        pool.allocate(3)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="can't be shared"):
        pool.share(pages)


@given_examples(20, 200, data=st.data())
def test_no_page_is_lost_over_random_operations(data):
    pool = PagePool(data.draw(st.integers(1, 12)))
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if action == "allocate":
            held.append(pool.allocate(data.draw(st.integers(0, pool.num_free))))
        elif held and action == "share":
            pages = data.draw(st.sampled_from(held))
            pool.share(pages)
            held.append(list(pages))
        elif held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        pool.check()
    for pages in held:
        pool.release(pages)
    pool.check()
    assert pool.num_free == pool.num_pages
