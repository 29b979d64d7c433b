"""The forms in which the client takes images, and their messages."""
