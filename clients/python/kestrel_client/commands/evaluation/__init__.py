"""``eval``: asks a server about the rows of a data set, scores the answers, and writes a report.

A data set is a module of ``sets/``: what to ask about a row, what is true, and the score of an answer. ``reading.py``
reads the rows, and ``batch`` runs them. ``scored.py`` joins answers and truths, ``statistics.py``
computes, ``report.py`` writes.
"""
