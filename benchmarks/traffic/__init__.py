"""Requests and the callers that send them: traces, images, processes of clients."""
