"""The gaps between tokens, with and without room for decode steps; on a CPU both are the same."""

from pathlib import Path

import pytest

from benchmarks.diagnostics import token_gaps
from kestrel_engine.scheduler.lanes import beside
from kestrel_engine.scheduler.lanes.beside import Beside, Load
from tests.benchmarks.test_smoke import run


@pytest.mark.slow
def test_both_forms_are_measured_in_turns(tmp_path: Path) -> None:
    (rows,) = run(token_gaps, tmp_path)["tables"].values()
    assert [row["room"] for row in rows] == ["no", "yes"]
    for row in rows:
        for name in ("callers", "first", "step thread", "between steps", "decode steps"):
            p50, p95, p99 = map(float, row[name].split(" / "))
            assert 0 < p50 <= p95 <= p99


def test_without_room_no_step_leaves_any() -> None:
    lane = Beside(itl_target_s=0.0, room=True)
    lane.launched_new_work(0, Load(1.0))
    lane.ended(0, 0.1)
    assert lane.leaves_room(Load(1.0, 60, 60))
    with token_gaps.without_room():
        assert not lane.leaves_room(Load(1.0, 60, 60))
    assert beside.MANY_WAITING < 60
