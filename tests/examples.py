"""given_examples: a property that ``make test`` tries with few examples, and ``make test-slow`` with many."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

Check = Callable[..., None]


def given_examples(few: int, many: int, **strategies: Any) -> Callable[[Check], Check]:
    """Makes a test of a function that checks one example. ``strategies`` draws its arguments by name; the others are
    pytest's."""

    def decorate(check: Check) -> Check:
        def test(examples: int, **arguments: Any) -> None:
            # A busy machine draws slowly.
            patient = settings(
                max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
            )
            patient(given(**strategies)(check))(**arguments)

        names = [
            "examples",
            *(n for n in inspect.signature(check).parameters if n not in strategies),
        ]
        kind = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        for name in ("__doc__", "__module__", "__name__", "__qualname__"):
            setattr(test, name, getattr(check, name))
        test.__signature__ = signature  # type: ignore[attr-defined]
        counts = [few, pytest.param(many, marks=pytest.mark.slow)]
        marked: Check = pytest.mark.parametrize("examples", counts)(test)
        return marked

    return decorate
