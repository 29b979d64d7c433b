"""Whole servers as replicas of Ray Serve, which places them on nodes, restarts, replaces and scales them.

Calls go straight from clients, or from Envoy, to the servers. on_ray.py is the only module that imports Ray.
"""
