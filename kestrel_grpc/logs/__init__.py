"""Log records: their format, and the thread that writes them."""
