"""Charts: renderer, questions and truth."""
