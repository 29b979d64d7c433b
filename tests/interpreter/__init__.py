"""Divides what Triton's interpreter costs, by not doing again what it has done, and rounds to FP8 as a GPU does.

It works on names that Triton keeps to itself: where one is missing, that part of the interpreter stays as it is.
"""
