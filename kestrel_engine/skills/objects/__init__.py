"""Objects that a skill finds: the cycle that names them, their scores, and the paths of their outlines."""
