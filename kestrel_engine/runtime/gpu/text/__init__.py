"""The text decoder's passes, and its weights as they read them."""
