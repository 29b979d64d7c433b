"""Icons: renderer, questions and truth."""
