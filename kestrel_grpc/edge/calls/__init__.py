"""One call: its id, caller, options, limit and result."""
