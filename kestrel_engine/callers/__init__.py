"""What callers hold: requests in, results and events out, on the event loop's side of the engine."""
