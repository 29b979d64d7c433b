"""The address of a Ray cluster's head."""

import socket

import pytest

from kestrel_grpc.cluster.head import ClusterError, checked_head


def test_a_head_that_answers():
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        assert checked_head({"RAY_ADDRESS": address}) == address
    assert checked_head({"RAY_ADDRESS": ""}) == checked_head({}) == "auto"


@pytest.mark.parametrize(
    "address, message",
    [
        ("127.0.0.1:1", "^RAY_ADDRESS=127.0.0.1:1: no Ray head answers there .Connection refused"),
        ("127.0.0.1:99999", "no Ray head answers there"),
        ("ray://127.0.0.1:10001", "must be HOST:PORT of the head"),
        ("head", "must be HOST:PORT of the head"),
        ("head:²", "must be HOST:PORT of the head"),
        ("no name:6379", "no Ray head answers there"),
    ],
)
def test_addresses_without_a_head(address, message):
    with pytest.raises(ClusterError, match=message):
        checked_head({"RAY_ADDRESS": address})
