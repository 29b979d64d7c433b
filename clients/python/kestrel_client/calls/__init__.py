"""The two clients and their shared parts: requests, channels, streams and batches."""
