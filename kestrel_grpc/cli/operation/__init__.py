"""Commands for operators: a running server, its tokens, and the machine it runs on."""
