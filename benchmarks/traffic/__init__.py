"""Requests and their callers: traces, images, and the processes of servers and clients."""
