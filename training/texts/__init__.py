"""Texts about a scene: phrases, captions, questions, and the prompts made of them."""
