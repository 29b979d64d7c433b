"""Kestrel's inference engine for Moondream vision-language models. Importing it loads no torch."""
