"""The results of the skills: frozen dataclasses, read from the messages, and their forms for other tools."""
