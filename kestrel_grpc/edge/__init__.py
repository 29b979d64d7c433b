"""The edge of every call: its caller, its id, its limits, its status."""
