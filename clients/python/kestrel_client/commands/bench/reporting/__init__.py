"""The output of a run: a file of results, a report, a comparison of runs."""
