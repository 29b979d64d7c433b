"""How kestrel-tiny is made: scenes, images, prompts, training, export and evaluation.

Nothing here is imported by the served packages; the engine only reads the files that ``training.export``
writes into ``kestrel_engine/bundled/kestrel_tiny``.
"""
