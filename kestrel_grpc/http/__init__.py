"""HTTP beside gRPC: other programs' request forms, each turned into the messages of kestrel.v1 and back.

Every request passes the same guard as a gRPC call, and the same services answer it.
"""
