"""The arithmetic of benchmarks/fleet.py, without a server."""

import pytest

from benchmarks import fleet


def test_a_list_of_servers_spreads_images_better_than_a_name():
    named, listed = fleet.ring_places(200)
    assert (named, listed) == (4096, 256 * 200)
    assert 1 <= fleet.busiest(200, listed) < fleet.busiest(200, named) < 4
    assert fleet.busiest(1, 256) == pytest.approx(1)


def test_lists_of_servers_grow_with_their_number():
    assert fleet.sizes(20)[0] > 1.5 * fleet.sizes(10)[0]
    # Envoy's file and the directory's answer hold 1,000 servers within the follower's limit.
    assert max(fleet.sizes(1000)) < 1024 * 1024
