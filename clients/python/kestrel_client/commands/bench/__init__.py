"""``bench``: load of a server in stages, until it is overloaded; results as text, JSON and an HTML report.

``sending`` sends the requests and measures, in one or several processes. ``reporting`` stores, draws and compares
results.
"""
