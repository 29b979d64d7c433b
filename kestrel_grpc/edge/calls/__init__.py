"""One call: its id, caller, limit and result, and the number of calls in progress."""
