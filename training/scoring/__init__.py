"""The frozen evaluation set, and the scores on it."""
