"""Photographed things, cut from clean public sets, and emoji: a closed list of names, and "I don't know" outside it."""
