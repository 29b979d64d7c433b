"""The passes of the text decoder, and the layout of their weights."""
