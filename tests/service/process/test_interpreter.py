"""What a server sets for its process."""

import pytest

from kestrel_grpc.process.interpreter import SPINS, limit_spinning


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_spinning_is_limited_unless_the_operator_chose(monkeypatch, chosen, spins):
    environ = dict(chosen)
    monkeypatch.setattr("os.environ", environ)
    limit_spinning()
    assert environ.get("GOMP_SPINCOUNT") == spins
