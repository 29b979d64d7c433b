"""``python -m training.scenes.evaluate FLAGS``: ``kestrel eval`` about the scenes, whose images are drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kestrel_client.commands.evaluation.sets import MODULES
from kestrel_client.commands.program import main


def evaluate(flags: Sequence[str]) -> int:
    """Runs ``eval`` about the scenes. Returns the exit status."""
    MODULES["scenes"] = f"{__package__}.benchmark"
    return main(["eval", "scenes", *flags])


if __name__ == "__main__":
    sys.exit(evaluate(sys.argv[1:]))
