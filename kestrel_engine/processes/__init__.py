"""Child processes: a template that forks them, the lines to them, what confines them, and how they end.

A `Template` is the parent's handle of a process that has imported much and has one thread. `Forks` is the loop of that
process, `Fork` what each of its forks gets, and `Line` the messages between a fork and the parent.
"""

from .forking import Fork, Forks
from .lines import Line
from .parent_death import end_with_parent
from .template import Template

__all__ = ["Fork", "Forks", "Line", "Template", "end_with_parent"]
