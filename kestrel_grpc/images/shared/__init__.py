"""Images in a store that several servers share. A server that does not reach it has its own images."""
