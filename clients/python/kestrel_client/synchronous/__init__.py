"""Generated from ``asynchronous`` by clients/python/generate_sync.py: edit nothing here."""
