"""Makes kestrel-tiny from the scenes of ``kestrel_grpc.scenes``: images, prompts, training, export and evaluation.

The engine and the server import nothing from this package. The engine only reads the files that ``training.export``
writes to ``kestrel_engine/bundled/kestrel_tiny``.
"""
