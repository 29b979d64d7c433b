"""Several worker processes behind one port, each with its own server, engine and device, and their supervisor.

The supervisor's modules (plan, devices, port, child, restarts, supervisor, front) import neither grpc nor torch.
worker.py runs in the worker's process. line.py defines the messages between them. front/ gives calls to the workers.
"""
