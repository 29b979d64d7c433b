"""The code around every call: its caller, its id, its limits and its status.

``call_life.py`` has the steps of every call in their order, for all transports. The other files of this folder are
gRPC's transport: the methods of a port, those whose streams carry many requests, and those without credentials.
"""
