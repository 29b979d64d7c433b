"""The code around every call: its caller, its id, its limits and its status."""
