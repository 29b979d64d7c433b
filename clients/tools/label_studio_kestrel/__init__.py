"""A machine learning backend for Label Studio, which answers with the results of a server: docs/use/tools.md."""
