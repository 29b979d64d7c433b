"""The list of a cluster's servers: who is on it, and what others read."""

import json
from dataclasses import replace

import pytest

from kestrel_grpc.cluster.directory import (
    COLLECTING_S,
    FORGET_S,
    SILENT_S,
    Directory,
    Server,
    as_json,
    endpoints,
    from_json,
)


def server(name, port=1, **changes):
    made = Server(
        replica=name, address=f"10.0.0.7:{port}", node="n", model="m", version="v", serving=True,
        load={"utilization": 0.5},
    )  # fmt: skip
    return replace(made, **changes)


def names(directory, now):
    return [each.replica for each in directory.servers(now)]


def test_a_server_is_listed_while_it_speaks_and_serves():
    directory = Directory(0.0)
    directory.beat(server("b", 2), 0.0)
    directory.beat(server("a", 1), 0.0)
    assert names(directory, 1.0) == ["a", "b"]
    directory.beat(server("b", 2, serving=False), 2.0)
    assert names(directory, 2.0) == ["a"]
    directory.beat(server("b", 2), 3.0)
    directory.leave("a")
    directory.leave("a")
    assert names(directory, 3.0) == ["b"]


def test_a_silent_server_is_left_out_but_not_all_of_them():
    directory = Directory(0.0)
    directory.beat(server("a", 1), 0.0)
    directory.beat(server("b", 2), 1.0)
    assert names(directory, SILENT_S + 0.5) == ["b"]
    # Nobody speaks: the way to the directory is broken, rather than every server.
    assert names(directory, 10 * FORGET_S) == ["a", "b"]
    directory.beat(server("b", 2), 10 * FORGET_S)
    assert names(directory, 10 * FORGET_S) == ["b"]


def test_a_server_at_the_address_of_another_takes_its_place():
    directory = Directory(0.0)
    directory.beat(server("old"), 0.0)
    directory.beat(server("new"), 1.0)
    assert names(directory, 1.0) == ["new"]


def test_a_directory_is_complete_once_all_could_speak():
    directory = Directory(5.0)
    assert not directory.is_complete(5.0 + COLLECTING_S - 0.1)
    assert directory.is_complete(5.0 + COLLECTING_S)


def test_others_read_what_was_written():
    listed = [server("a", 1), server("b", 2)]
    written = json.loads(json.dumps(as_json(listed)))
    written["servers"][0]["later"] = "field"
    assert from_json(written) == listed


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"servers": 1},
        {"servers": [1]},
        {"servers": [{"replica": "a"}]},
        as_json([server("a", address=5)]),
        as_json([server("a", load={"x": "y"})]),
    ],
)
def test_other_answers_are_refused(value):
    with pytest.raises(ValueError, match="is not the answer of a directory"):
        from_json(value)


def test_envoy_s_endpoints():
    (resource,) = endpoints([server("a", 1), server("b", address="[fd00::1]:2")])["resources"]
    assert resource["cluster_name"] == "kestrel"
    (locality,) = resource["endpoints"]
    found = [each["endpoint"]["address"]["socket_address"] for each in locality["lb_endpoints"]]
    assert found == [
        {"address": "10.0.0.7", "port_value": 1},
        {"address": "fd00::1", "port_value": 2},
    ]
