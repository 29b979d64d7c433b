"""The parts of a request's time add up, for images that are new and for known ones."""

from pathlib import Path

import pytest

from benchmarks.diagnostics import one_request
from tests.benchmarks.test_smoke import run


@pytest.mark.slow
def test_the_parts_follow_one_another(tmp_path: Path) -> None:
    (rows,) = run(one_request, tmp_path)["tables"].values()
    for image in ("new", "known"):
        parts = {row["part"]: row["ms"] for row in rows if row["image"] == image}
        whole = parts.pop("all")
        one_after_the_other = sum(ms for part, ms in parts.items() if not part.startswith("("))
        assert 0.5 * whole < one_after_the_other < 2 * whole, "medians of a few requests"
        assert parts["(the device: prompt)"] > 0
