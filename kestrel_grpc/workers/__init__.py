"""Several worker processes behind one port, each with its own server, engine and device, and their supervisor.

The supervisor's modules (plan, devices, port, child, forks, restarts, supervisor, front) import neither grpc nor torch.
template.py runs in the process from which workers are forked, worker.py in the worker's.
"""
