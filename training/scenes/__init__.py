"""The closed world of kestrel-tiny: coloured shapes, their drawing, the questions about them, the frozen evaluation set
and its scores.

Training draws from it, and ``kestrel-grpc eval scenes`` asks about it. It imports nothing else of the packages.
"""
