"""Constraints on a text: the setting, and the automata that give the tokens allowed next."""
