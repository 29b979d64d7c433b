"""The closed world of coloured shapes: their drawing, and the questions about them.

kestrel-small's domain "shapes" draws from it. kestrel-tiny has its frozen evaluation set and its scores here, about
which ``python -m training.scenes.evaluate`` asks.
"""
