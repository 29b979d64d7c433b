"""Answers calls of the skills: starts the engine's requests, and makes the response from their results."""
