"""What callers use beside requests: typed calls, whether the engine takes requests, its watchdog and its profiles."""
