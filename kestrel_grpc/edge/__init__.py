"""The code around every call: its caller, its id, its limits and its status.

This folder holds what gRPC calls: an interceptor for each method, and the handlers of streams that carry many requests
and of calls without credentials. ``calls`` describes and limits a call, ``messages`` reads its requests and writes its
responses, and ``failures`` turns an error into the status that ends the call.
"""
