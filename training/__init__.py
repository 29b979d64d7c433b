"""Makes the bundled model kestrel-small (README.md).

The engine and the server import nothing from this package.
"""
