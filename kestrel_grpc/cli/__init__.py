"""The command line: one module a command. A command loads what it needs and no more: only serving loads torch."""
