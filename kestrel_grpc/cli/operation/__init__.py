"""Commands for operators: about a running server, its tokens, and its machine."""
