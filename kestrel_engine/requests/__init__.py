"""The one Request, and its stages: a place, checks, constraint, adapter, images, its sequences, and its end."""
