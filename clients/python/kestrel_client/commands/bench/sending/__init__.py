"""Sends the requests of a stage and measures them."""
