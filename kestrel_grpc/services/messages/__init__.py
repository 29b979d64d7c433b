"""Messages of kestrel.v1 to arguments of the engine, and its results to messages. Pure functions."""
