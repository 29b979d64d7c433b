"""The scenes are drawn with one torch thread, as in the tests of training."""

from tests.training.conftest import one_thread

__all__ = ["one_thread"]
