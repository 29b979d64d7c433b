"""Several processes behind one port, each a whole server with an engine and a device of its own; and who watches them.

The supervisor's side (config, flags, plan, devices, port, child, restarts, supervisor) loads neither grpc nor torch;
the worker's side is worker.py. line.py is what they say to each other.
"""
