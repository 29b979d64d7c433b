"""The benchmark of the front end runs at a hundredth of its size; figures are not judged here."""

import json

import pytest

from benchmarks.overhead import through_grpc


@pytest.mark.slow
def test_it_tells_service_and_echo_apart(tmp_path):
    path = tmp_path / "report.json"
    through_grpc.main(["--quick", "--json", str(path)])
    report = json.loads(path.read_text())
    streams, wires, *calls = report["tables"].values()
    assert len(calls) == 4
    assert [row["of"] for row in wires] == ["gRPC", "Connect"]
    assert all(row["us of CPU"] > 0 < row["tokens/s"] for row in wires)
    for rows in (streams, *calls):
        server, echo, *others = rows
        assert server["of"] == "as it is" and echo["of"] == "echo"
        assert server["us of CPU"] > server["its engine"] > 0
        assert echo["us of CPU"] > 0 == echo["its engine"] == echo["added"]
        assert [row["of"] for row in others] in ([], ["echo, headers too"])
        # The bar of one turn: beyond the echo that sends what the server sends.
        same = others[0] if others else echo
        own = server["us of CPU"] - server["its engine"]
        assert server["headers too"] == pytest.approx(own - same["us of CPU"])
    limits = [bar["limit"] for bar in report["bars"]]
    assert limits == [15.0, 0.9, *4 * [150.0]]
