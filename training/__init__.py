"""Makes the bundled models: kestrel-tiny from the scenes of ``kestrel_grpc.scenes``, and kestrel-small (README.md).

The engine and the server import nothing from this package. The engine only reads the files that ``training.export``
writes to ``kestrel_engine/bundled/kestrel_tiny``.
"""
